"""HTTP requests of the tinker SDK: the key, bodies within a bound, and errors in the form that the SDK reads."""

import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from swarm.errors import TooLarge, Unavailable
from swarm.extras.tinker.tinker_requests import read_tinker_request
from swarm.serving.http_server import read_body
from swarm.serving.openai_requests import RequestRefused

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 * 2**20
MAX_ORDER_BYTES: Final = 256  # of a body: they hold model and number

Endpoint = Callable[[Request], Awaitable[Response]]


def guarded(endpoint: Endpoint, key: bytes) -> Endpoint:
    """Wraps an endpoint: it serves only callers with the key, and errors become answers that the SDK can read."""

    async def answer(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), key):
            return JSONResponse({"detail": "no valid key: set TINKER_API_KEY to what the server printed"}, 401)
        try:
            return await endpoint(request)
        except RequestRefused as error:
            return JSONResponse({"detail": str(error)}, error.status)
        except Unavailable as error:
            return JSONResponse({"detail": str(error)}, 503, headers={"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception:  # task boundary: one request must not end the others
            logger.exception("request failed", extra={"path": request.url.path})
            return JSONResponse({"detail": "this request failed; the server's log says why"}, 500)

    return answer


async def body_of(request: Request) -> bytes:
    """Reads the whole body of a request. Raises RequestRefused beyond MAX_BODY_BYTES."""
    try:
        return await read_body(request.stream(), MAX_BODY_BYTES)
    except TooLarge as error:
        raise RequestRefused(str(error), status=413) from None


async def body_and_beginning(request: Request, beginning: bytearray) -> bytes:
    """Reads the whole body of a request; its first MAX_ORDER_BYTES are added to `beginning`.

    Raises:
        TooLarge: the body exceeds MAX_BODY_BYTES; `beginning` has its first bytes all the same.
    """
    return await read_body(_keeping_first(request.stream(), beginning), MAX_BODY_BYTES)


async def decoded(request: Request) -> object:
    """Reads and decodes a JSON body. Raises RequestRefused if it is not JSON, or too long."""
    try:
        return json.loads(await body_of(request))
    except (ValueError, RecursionError):
        raise RequestRefused("body: not JSON") from None


async def read_json(request: Request, kind: type[Any]) -> Any:
    """Reads a JSON body as a request of class `kind`. Raises RequestRefused."""
    return read_tinker_request(kind, await decoded(request))


async def _keeping_first(parts: AsyncIterable[bytes], first: bytearray) -> AsyncGenerator[bytes]:
    async for part in parts:
        first += part[: MAX_ORDER_BYTES - len(first)]
        yield part
