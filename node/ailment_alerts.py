"""Alerts for findings of `swarm why` in a running node, one for as long as a finding stays.

Invariant: the diagnosis runs in its own process, so that reading long logs holds up no peer.
"""

import asyncio
import json
import logging
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from swarm.config import NodeConfig
from swarm.process import END_SILENCE_S, comes, work_of

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 60.0
_GRAVE: Final = ("stops", "harms")


class Alert(Protocol):
    """Function that shows an alert to people; `is_grave`: the finding stops or harms the node."""

    def __call__(self, title: str, text: str, *, is_grave: bool) -> None: ...


@dataclass(kw_only=True)
class AilmentAlerts:
    """Diagnoses a node every minute, and sends an alert for each new finding.

    Example:
        await AilmentAlerts(config=config, alert=telemetry.alert).keep()
    """

    config: NodeConfig  # of the node
    alert: Alert
    every_s: float = LOOK_EVERY_S
    _known: frozenset[str] = field(default=frozenset(), init=False)

    async def keep(self) -> None:
        """Diagnoses the node every `every_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            findings = await self._diagnose()
            if findings is not None:  # without a diagnosis the known findings stay known
                self.take(findings)

    def take(self, findings: list[dict[str, Any]]) -> None:
        """Sends an alert for each finding that was absent at the last look; notes are left out."""
        ailments = {each["name"]: each for each in findings if each["gravity"] != "note"}
        for name, each in ailments.items():
            if name not in self._known:
                text = "\n".join([*each["evidence"], f"fix: {each['fix']}" if each["fix"] else ""]).strip()
                self.alert(f"{name}: {each['claim']}", text, is_grave=each["gravity"] in _GRAVE)
        self._known = frozenset(ailments)

    async def _diagnose(self) -> list[dict[str, Any]] | None:
        """The findings of `swarm why --json`; None if the command fails or hangs."""
        command = (sys.executable, "-m", "swarm.cli.main", "why", str(self.config.dir), "--json")
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            reading = asyncio.ensure_future(process.communicate())
            if not await comes(reading, partial(work_of, process.pid)):
                logger.warning("no diagnosis for alerts", extra={"error": f"silent for {END_SILENCE_S:.0f} s"})
                return None
            return json.loads(reading.result()[0])["findings"]
        except (ValueError, KeyError) as error:
            logger.warning("no diagnosis for alerts", extra={"error": f"{type(error).__name__}: {error}"})
            return None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
