"""Quire without servers: ``python docs/offline.py``.

The first run fetches the demo model (93 MB); ``--model`` names another.
"""

import argparse
import sys

from quire import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, StructuredOutputsParams

PROMPTS = ["The capital of France is", "Once upon a time", "One, two, three,"]


def all_at_once(model: str) -> None:
    """Whole answers: prompts are batched, and come back in their order."""
    llm = LLM(model=model, max_model_len=256)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24)):
        sys.stdout.write(f"{output.prompt}|{output.outputs[0].text}\n")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    for answer in llm.chat(question, SamplingParams(n=2, seed=1, max_tokens=48))[0].outputs:
        sys.stdout.write(f"[{answer.index}, {answer.finish_reason}] {answer.text}\n")
    cities = StructuredOutputsParams(choice=["London", "Paris", "Rome"])
    for output in llm.chat(question, SamplingParams(temperature=0.0, structured_outputs=cities)):
        sys.stdout.write(f"One of three: {output.outputs[0].text}\n")
    llm.llm_engine.close()


def step_by_step(model: str) -> None:
    """The same engine by hand: requests come and go between its steps, and text is shown as it is made."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, max_model_len=256))
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["\n"], output_kind=RequestOutputKind.DELTA)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "0":
                sys.stdout.write(output.outputs[0].text)
        steps += 1
        if steps == 8:
            engine.abort_request("1")
    sys.stdout.write(f"\n[{steps} steps]\n")
    engine.close()


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser(description="Generate text in this process.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder, .gguf file or hub id")
    model = parser.parse_args().model
    all_at_once(model)
    step_by_step(model)


if __name__ == "__main__":
    main()
