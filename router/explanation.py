"""What Explain answers: how the policy sees each worker for one prompt."""

from collections.abc import Sequence

from protos import inference_pb2
from protos.prefix import TOKEN_BYTES, block_hashes
from router.fleet_view import FleetView
from router.routing.dispatcher import Dispatcher
from router.routing.waiting import Waiting
from router.worker_link import WorkerLink


def explain(
    prompt: bytes,
    cache_salt: bytes,
    session_id: bytes,
    *,
    links: Sequence[WorkerLink],
    view: FleetView,
    dispatcher: Dispatcher,
    queued: int,
    now: float,
) -> inference_pb2.ExplainResponse:
    """Scores a prompt on every worker and changes nothing.

    Args:
        prompt: packed ids.
        cache_salt, session_id: as in the request.
        links: all workers, those that are away too.
        view, dispatcher: what decides; the view is up to date.
        queued: requests that wait.
        now: the loop's time.
    """
    names = block_hashes(prompt, view.block_size, cache_salt)
    tokens = len(prompt) // TOKEN_BYTES
    entry = Waiting(names, tokens, now, view.block_size, affinity=session_id or (names[0] if names else prompt))
    chosen = None if queued else dispatcher.choose_now(entry, now)
    response = inference_pb2.ExplainResponse(
        prompt_tokens=tokens,
        policy=dispatcher.policy.name,
        chosen="" if chosen is None else view.link(chosen).name,
        queued=queued,
    )
    question = dispatcher.question(entry, now)
    for link in links:
        candidate = response.candidates.add(
            worker=link.name, ready=link.ready, running=link.slots.running, capacity=link.slots.size
        )
        worker = view.view(link)
        if worker is None:
            continue
        parts = question.score(worker)
        candidate.score = dispatcher.policy.rank(question, worker)
        candidate.cached_tokens = question.cached(worker)
        candidate.wait_s, candidate.work_s = parts.wait, parts.work
        candidate.decode_s, candidate.memory_s = parts.decode, parts.memory
        candidate.index_state = worker.cache.state(now).value
        candidate.backlog_tokens = worker.backlog
    return response
