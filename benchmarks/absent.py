"""A comparison that could not be made, and why."""


class NotMade(Exception):
    """Raised where a contender is missing or refuses; the message is kept in the results."""


def reason(error: BaseException, limit: int = 400) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:limit]
