"""One HTTP connection: uvicorn's, with a limit on the time in which a request's headers must come.

uvicorn ends connections that are idle after a request, and the app bounds the time of bodies. What comes between would
have no end: a connection that never says anything, and headers that stop halfway.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.errors import ApiError


class Connection(H11Protocol):
    """Closes itself when headers do not come in time, with a 408 if they have begun to.

    Subclasses set ``header_timeout``, in seconds: from the connection's beginning, or a later request's first byte, to
    the end of its headers; and from the answer to a request to the end of its body, where that came first.
    """

    header_timeout: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes in what has come."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Goes on with what has come of the next request meanwhile."""
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Whether headers are complete, or the next ones have begun; more of them gives them no more time.

        What is left of the body of a request that was answered, nobody reads: it has as much time.
        """
        answered = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE, h11.SEND_BODY)
        if self.conn.their_state is h11.SEND_BODY and answered:
            if self._deadline is None:
                self._wait()
        elif self.conn.their_state is not h11.IDLE:
            self._wait_no_more()
        elif self._deadline is None and self._has_begun():
            self._wait()

    def _has_begun(self) -> bool:
        return bool(self.conn.trailing_data[0])

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout, self._on_deadline)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self._has_begun():
            error = ApiError(408, f"The headers did not come within {self.header_timeout:g} seconds.")
            body = json.dumps(error.body()).encode()
            length = ("content-length", str(len(body)))
            headers = [("content-type", "application/json"), length, ("connection", "close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=b"Request Timeout"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()


def connection_type(header_timeout: float) -> type[Connection]:
    """The class of connections with this limit, in seconds."""
    return type("LimitedConnection", (Connection,), {"header_timeout": header_timeout})
