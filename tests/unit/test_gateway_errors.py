"""How gRPC statuses are answered."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc.aio import AioRpcError, Metadata

from gateway.errors import from_rpc
from tests.integration.fake_inference import Failure, bad_request, retry_after

CODES = grpc.StatusCode
# The table of docs/architecture.md.
TABLE = {
    CODES.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    CODES.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    CODES.ALREADY_EXISTS: (409, "invalid_request_error", "already_exists"),
    CODES.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    CODES.CANCELLED: (499, "invalid_request_error", "request_cancelled"),
    CODES.UNAVAILABLE: (503, "server_error", "service_unavailable"),
    CODES.DEADLINE_EXCEEDED: (504, "server_error", "timeout"),
}
# Statuses that only the router sends, so that their text is for clients even without details.
ROUTERS_OWN = (CODES.INVALID_ARGUMENT, CODES.NOT_FOUND, CODES.ALREADY_EXISTS)


def rpc_error(code, message="secret 10.0.0.1", details=None):
    trailing = Metadata()
    if details is not None:
        trailing = Metadata(*Failure(code, message, details).rich().trailing_metadata)
    return AioRpcError(code, Metadata(), trailing, details=message)


@pytest.mark.parametrize("code", [code for code in CODES if code is not CODES.OK])
def test_every_status_has_an_answer(code):
    answer = from_rpc(rpc_error(code), str)
    assert (answer.status, answer.type, answer.code) == TABLE.get(code, (500, "server_error", "internal_error"))
    assert (answer.retry_after is not None) == (answer.status in (429, 503))


@pytest.mark.parametrize("code", [code for code in CODES if code not in ROUTERS_OWN and code is not CODES.OK])
def test_text_that_is_not_the_routers_stays_inside(code):
    assert "secret" not in from_rpc(rpc_error(code), str).message


@pytest.mark.parametrize("code", TABLE)
def test_text_that_comes_with_details_is_for_the_client(code):
    answer = from_rpc(rpc_error(code, "say this", (error_details_pb2.ErrorInfo(reason="R"),)), str)
    assert answer.message == "say this"


def test_internal_errors_are_found_in_the_log_by_their_id(caplog):
    answer = from_rpc(rpc_error(CODES.INTERNAL), str)
    error_id = answer.message.split()[2].rstrip(".")
    assert len(error_id) == 32
    assert error_id in caplog.text
    assert "secret 10.0.0.1" in caplog.text


def test_a_quarantined_request_is_told_so():
    details = (error_details_pb2.ErrorInfo(reason="REQUEST_QUARANTINED"),)
    answer = from_rpc(rpc_error(CODES.INTERNAL, "2 workers crashed", details), str)
    assert (answer.status, answer.code, answer.message) == (500, "request_quarantined", "2 workers crashed")


def test_details_are_read_in_any_order_and_number():
    details = (
        error_details_pb2.ErrorInfo(reason="CONTEXT_LENGTH_EXCEEDED"),
        retry_after(1.2),
        bad_request("stopping.max_tokens"),
    )
    answer = from_rpc(rpc_error(CODES.INVALID_ARGUMENT, "too long", details), lambda name: f"<{name}>")
    assert (answer.code, answer.param, answer.message) == (
        "context_length_exceeded", "<stopping.max_tokens>", "too long",
    )  # fmt: skip
    assert answer.retry_after is None


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.2, "2"), (30.0, "30")])
def test_retry_after_is_whole_seconds_and_never_too_early(seconds, header):
    answer = from_rpc(rpc_error(CODES.UNAVAILABLE, "wait", (retry_after(seconds),)), str)
    assert answer.headers() == {"retry-after": header}


def test_details_that_cannot_be_read_are_no_details():
    error = AioRpcError(
        CODES.UNAVAILABLE, Metadata(), Metadata(("grpc-status-details-bin", b"\xff\xff")), details="secret 10.0.0.1"
    )
    answer = from_rpc(error, str)
    assert answer.status == 503
    assert "secret" not in answer.message
