"""Decides from a request and the server's settings how its outputs are read and what they are checked against."""

from functools import partial

from gateway.chat_dialect import thinks
from gateway.config import GatewayConfig
from gateway.constraint import constraint_of
from gateway.errors import invalid
from gateway.output_check import OutputCheck, SchemaCheck
from gateway.output_reader import OutputPlan
from gateway.reasoning import reasoning_parser, reasoning_tokens
from gateway.schema import ChatBody, GenerateBody
from gateway.tool_parsers import PARSERS
from gateway.tool_parsers.forced_call import ForcedCallParser
from gateway.tools import held_schema, named, offered, parallel, parameters_schema


def output_plan(body: GenerateBody, config: GatewayConfig, tool_format: str) -> OutputPlan:
    """The plan of a request; calls are read in ``tool_format``. Raises ApiError (400)."""
    if isinstance(body, ChatBody) and body.tool_choice == "required":
        # One schema is made of all of them, whose faults would have no names.
        for index, one in enumerate(offered(body)):
            SchemaCheck(held_schema(one, index), f"tools.{index}.function.parameters")
    constraint = constraint_of(body)
    check = OutputCheck(constraint)
    if not isinstance(body, ChatBody):
        return OutputPlan(check)
    # What a grammar binds, it binds from the first token on: there is no room for reasoning.
    reasoning = tokens = None
    if constraint is None and config.reasoning_parser:
        # Told not to think, a template opens no reasoning.
        name = config.reasoning_parser if thinks(body) else "qwen3"
        reasoning, tokens = partial(reasoning_parser, name), partial(reasoning_tokens, name)
    functions = offered(body)
    if not functions:
        return OutputPlan(check, reasoning, reasoning_tokens=tokens)
    function = named(body)
    if function is not None:
        return OutputPlan(check, tools=partial(ForcedCallParser, function.name))
    if constraint is not None and body.tool_choice != "required":
        raise invalid(
            "tools", f"tools and {constraint.param} cannot be followed together; with tool_choice none they can"
        )
    names = [function.name for function in functions]
    parser = PARSERS["json" if body.tool_choice == "required" else tool_format]
    strict = {
        function.name: SchemaCheck(parameters_schema(function), f"tools.{index}.function.parameters")
        for index, function in enumerate(functions)
        if function.strict
    }
    tools = partial(parser, names, parallel=parallel(body))
    return OutputPlan(check, reasoning, tools, strict, tokens, calls_only=body.tool_choice == "required")
