"""Text that UTF-8 can hold: JSON's escapes can write half of a surrogate pair, which is no character."""


def whole_characters(text: str) -> str:
    """The text with each pair of surrogates as the character that it means, and U+FFFD for each that is alone."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
