"""What every client is asked to do: say something, stream it, switch a lamp, describe a city by a schema."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ASK = [{"role": "user", "content": "Switch the lamp on, and name a city."}]
LAMP = {
    "type": "object",
    "properties": {"state": {"enum": ["on", "off"]}},
    "required": ["state"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "set_lamp", "description": "A lamp", "parameters": LAMP},
}


class City(BaseModel):
    """A city; short, so that a small model comes to its end."""

    model_config = ConfigDict(extra="forbid")

    size: Literal["small", "large"] = Field(description="How large it is")
    is_capital: bool


def check_state(arguments: dict[str, Any]) -> None:
    """The lamp's tool was called with what its schema allows."""
    assert arguments.keys() == {"state"}
    assert arguments["state"] in ("on", "off")
