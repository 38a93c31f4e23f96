"""What --mesh says, before the number of workers is known: axes and their degrees (tfdist/runtime/mesh.py)."""

from __future__ import annotations

from tfdist.control.exit_codes import ConfigError

AXES = ("pipe", "data", "expert", "model")
_DIVIDE_WEIGHTS = ("pipe", "expert", "model")


def degrees_of(text: str) -> dict[str, int]:
    """axis -> degree, of those that --mesh names. Raises ConfigError if the text is malformed."""
    degrees: dict[str, int] = {}
    for piece in (piece.strip() for piece in text.split(",")) if text.strip() else ():
        axis, equals, degree = (part.strip() for part in piece.partition("="))
        if not equals or axis not in AXES:
            raise ConfigError(
                f"--mesh={text}: {piece!r} is not axis=degree; the axes are {', '.join(AXES)}, for example"
                " data=2,model=2."
            )
        if axis in degrees:
            raise ConfigError(f"--mesh={text} gives {axis} twice: drop one of them.")
        if not degree.isdecimal() or int(degree) < 1:
            raise ConfigError(
                f"--mesh={text}: the degree of {axis} is {degree!r}; it must be a whole number, at least 1."
            )
        degrees[axis] = int(degree)
    return degrees


def cuts_of_weights(text: str) -> list[str]:
    """The parts of --mesh by which no worker holds all weights, such as "model=2". Raises ConfigError if the text is
    malformed."""
    return [f"{axis}={degree}" for axis, degree in degrees_of(text).items() if axis in _DIVIDE_WEIGHTS and degree > 1]
