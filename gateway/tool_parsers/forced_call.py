"""The output of a request that names the tool to call: a grammar has made it the arguments and nothing else."""

from gateway.parts import Arguments, CallStart
from gateway.text_machine import END, Reader, TextMachine


class ForcedCallParser(TextMachine):
    """Makes the whole text the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def _read(self) -> Reader[None]:
        char = yield from self._next()
        self._parts.append(CallStart(self._name))
        while char != END:
            self._parts.append(Arguments(char))
            self._raw.clear()
            char = yield from self._next()
