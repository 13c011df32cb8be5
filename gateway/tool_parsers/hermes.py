"""The format of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, anywhere in the text."""

from gateway.text_machine import END, Reader
from gateway.tool_parsers.call_reader import ToolParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Reads calls between marks. A closing mark that is missing is not missed."""

    @staticmethod
    def written(name: str, arguments: str) -> str:
        """A call in this format."""
        return f'{_OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{_CLOSE}'

    def _read(self) -> Reader[None]:
        closes = False
        while (mark := (yield from self._until(_OPEN, _CLOSE))) != END:
            if mark == _OPEN:
                closes = yield from self._call_or_text()
            elif closes:
                closes = False
            else:
                self._say(mark)
        self._end()
