"""Refresh of the run's manifest at a node that joined by its link: newer manifests are fetched, judged and kept.

Invariant: only a valid successor of the newest manifest is kept; an absent coordinator changes nothing.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import ConfigError, SwarmError, Unauthenticated, Unavailable
from swarm.identity import Identity
from swarm.types import short
from swarm.wire.held_manifest import save_held
from swarm.wire.join_link import JoinLink, fetch_manifest
from swarm.wire.run_manifest import WARN_BEFORE_S, SignedManifest, check_expiry, check_succession

logger = logging.getLogger(__name__)

REFRESH_EVERY_S: Final = 300.0
_TIMEOUT_S: Final = 10.0  # of one address
_BEGIN_TIMEOUT_S: Final = 20.0  # a coordinator that is away holds no start up for longer
_FOLLOWED: Final = ("serial", "expires_at_s", "next_key", "entry")  # what a running node takes over
_DATED_OR_FOLLOWED: Final = (*_FOLLOWED, "created_at_s")  # no news when they differ


class ManifestRefresh:
    """Keeps a node's manifest the newest one.

    Example:
        refresh = ManifestRefresh(config, identity, held, clock)
        held = await refresh.begin()
        refresh.on_change = follow
        tasks.create_task(refresh.keep())
    """

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        held: SignedManifest,
        clock: Clock,
        on_change: Callable[[SignedManifest], None] = lambda signed: None,
    ) -> None:
        """Starts from the held manifest; nothing is fetched yet.

        Args:
            on_change: called with each newer manifest.
        """
        self._config, self._identity, self._clock, self.on_change = config, identity, clock, on_change
        self.held = held

    async def begin(self) -> SignedManifest:
        """The manifest to start with: the newest that the coordinator serves, or the held one if none comes in time.

        A node that was off for long, or that an old list refuses, would not learn the present list otherwise.

        Raises:
            ConfigError: the held manifest has expired, and there is no newer one.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGIN_TIMEOUT_S):
                await self._try_refresh()
        check_expiry(self.held.manifest, self._clock.now_s())
        return self.held

    async def keep(self) -> None:
        """Looks for a newer manifest at once and every few minutes, until cancelled."""
        while True:
            await self._try_refresh()
            self._warn()
            await asyncio.sleep(REFRESH_EVERY_S * random.uniform(0.8, 1.2))

    async def _try_refresh(self) -> None:
        try:
            await self.refresh()
        except Unauthenticated as error:
            logger.warning("the coordinator's manifest was refused", extra={"error": str(error)})
        except SwarmError as error:
            logger.info("manifest not refreshed", extra={"error": str(error)})

    async def refresh(self) -> bool:
        """Fetches, judges and keeps the run's manifest; returns False if it equals the held one.

        Raises:
            Unauthenticated: the manifest may not follow the held one, or another key answers.
            ConfigError: the manifest breaks a bound, or has expired.
            Unavailable: no coordinator answers.
            StorageFull: the manifest cannot be written.
        """
        new = await self._fetch()
        check_succession(self.held, new)
        check_expiry(new.manifest, self._clock.now_s())
        if new.data == self.held.data:
            return False
        changed = [
            name
            for name in type(new.manifest).model_fields
            if name not in _DATED_OR_FOLLOWED and getattr(new.manifest, name) != getattr(self.held.manifest, name)
        ]
        await asyncio.to_thread(save_held, self._config.dir, new)
        self.held = new
        self.on_change(new)
        logger.info(
            "the run has a newer manifest",
            extra={"serial": new.manifest.serial, "key": short(new.key), "not_followed": changed},
        )
        return True

    async def _fetch(self) -> SignedManifest:
        """The manifest of the next key if that answers, else of the held key, which may be in a thief's hands."""
        addresses, run_id = self._config.coordinator.addresses, self._config.run_id
        link = JoinLink(addresses=addresses, run_id=run_id, fingerprint=self.held.key)
        following = self.held.manifest.next_key
        if following:
            try:
                return (await fetch_manifest(replace(link, fingerprint=following), self._identity, _TIMEOUT_S)).signed
            except (Unavailable, ConfigError) as error:
                logger.debug("the next key does not answer yet", extra={"error": str(error)})
        return (await fetch_manifest(link, self._identity, _TIMEOUT_S)).signed

    def _warn(self) -> None:
        ends_s = self.held.manifest.expires_at_s
        left_s = ends_s - self._clock.now_s()
        if ends_s and left_s < WARN_BEFORE_S:
            days = round(left_s / 86_400, 1)
            logger.warning("the run's manifest expires soon, and no newer one is there", extra={"days": days})
