"""Request deadline: ends a call whose request does not arrive in time.

gRPC counts a call as soon as its headers arrive and waits for its request forever, so calls with headers alone can fill
`maximum_concurrent_rpcs`: 40 connections without any key kept all other nodes out. Invariant: calls that wait for their
request are bounded in time, and in number for each subnet.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc

from swarm.errors import Unavailable
from swarm.fairness import FairTable
from swarm.wire.connection_limits import peer_subnet

REQUEST_TIMEOUT_S: Final = 5.0
MAX_WAITING: Final = 256  # calls of one subnet whose request has not come


class RequestDeadline(grpc.aio.ServerInterceptor):
    """Interceptor of a server that reads the one request of each call itself, within the deadline."""

    def __init__(
        self,
        refused: Callable[[str, Unavailable], Unavailable] = lambda peer, error: error,
        timeout_s: float = REQUEST_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Creates the interceptor.

        Args:
            refused: called with the peer and the error of a call to an unknown method; returns the error with a pause.
            timeout_s: time within which the request of a call must arrive.
            max_waiting: most calls of one subnet that wait for their request; one more ends the oldest.
        """
        self._refused = refused
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._waiting = FairTable[str, asyncio.Timeout]()  # by subnet

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wraps a unary-request handler so that it reads its request within the deadline.

        The wrapper is a streaming-request handler, which gRPC calls before the request has arrived. Streaming-request
        handlers are returned unchanged; an unknown method gets a handler that refuses the call.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_unary_rpc_method_handler(self._refuse)
        if handler.request_streaming:
            return handler
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:

            async def stream(requests: Any, context: Any) -> None:
                answers = handler.unary_stream(await self._request_of(requests, context), context)
                if not hasattr(answers, "__aiter__"):
                    await answers  # a handler that writes its answers itself
                    return
                async for answer in answers:
                    await context.write(answer)

            return grpc.stream_stream_rpc_method_handler(stream, **codec)

        async def unary(requests: Any, context: Any) -> Any:
            return await handler.unary_unary(await self._request_of(requests, context), context)

        return grpc.stream_unary_rpc_method_handler(unary, **codec)

    async def _refuse(self, _: Any, context: Any) -> None:
        error = self._refused(context.peer(), Unavailable("no such method"))
        await asyncio.sleep(error.pause_s)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))

    async def _request_of(self, requests: Any, context: Any) -> Any:
        subnet = peer_subnet(context.peer())
        try:
            async with asyncio.timeout(self._timeout_s) as ending:
                if len(self._waiting.of(subnet)) >= self._max_waiting:
                    # an honest request comes with its call, so the longest wait ends
                    self._waiting.pop_oldest(subnet).reschedule(asyncio.get_running_loop().time())
                self._waiting.add(subnet, ending)
                try:
                    return await anext(aiter(requests))
                finally:
                    self._waiting.remove(subnet, ending)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come in time; call again")
