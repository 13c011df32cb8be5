"""How the set of names that the prefix cache knows has changed, summed up: a name that came and went is not in it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixChanges:
    """What turns the names known at one time into those known at a later one.

    Forget all names if ``cleared``, then those ``removed``, then add those ``stored``. No name is in both.

    Attributes:
        removed, stored: names, 16 bytes each, as keys.
    """

    cleared: bool = False
    removed: dict[bytes, None] = field(default_factory=dict)
    stored: dict[bytes, None] = field(default_factory=dict)

    def __len__(self) -> int:
        """Names that changed."""
        return len(self.removed) + len(self.stored)

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed or self.stored)

    def store(self, name: bytes) -> None:
        """A name is known that was not."""
        if name in self.removed:
            del self.removed[name]
        else:
            self.stored[name] = None

    def remove(self, name: bytes) -> None:
        """A name that was known is not any more."""
        if name in self.stored:
            del self.stored[name]
        else:
            self.removed[name] = None

    def clear(self) -> None:
        """No name is known any more."""
        self.cleared = True
        self.removed.clear()
        self.stored.clear()

    def extend(self, later: "PrefixChanges") -> None:
        """Adds what changed after this."""
        if later.cleared:
            self.clear()
        for name in later.removed:
            self.remove(name)
        for name in later.stored:
            self.store(name)
