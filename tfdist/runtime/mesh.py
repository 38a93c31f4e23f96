"""The mesh: named axes over all workers, rank <-> coordinates, and groups of ranks. Pure arithmetic, no TensorFlow.

    pipe    stages of the model, one after another: each holds some of the layers
    data    copies of the model, each with its own part of every batch (and, with --zero, its own part of the state)
    expert  like data, but the experts of a mixture are spread over it
    model   parts of single layers (tensor parallelism)

An axis has a *degree*, the number of coordinates along it; the product of the degrees is the number of workers. Ranks
count through the coordinates in the order of AXES, the last axis fastest: ranks that differ only in `model`, which
communicate most, are neighbors, and so share a machine if its number of workers is a multiple of that degree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.config.mesh_degrees import AXES, degrees_of
from tfdist.control.exit_codes import ConfigError

REPLICA_AXES = ("data", "expert")  # along these, workers read different samples


@dataclass(frozen=True)
class Mesh:
    """The degrees of all axes, in the order of AXES."""

    degrees: tuple[int, ...]

    @classmethod
    def create(cls, **degrees: int) -> Mesh:
        """Makes a mesh, for example create(data=2, model=2); axes left out have degree 1."""
        return cls(tuple(degrees.get(axis, 1) for axis in AXES))

    @classmethod
    def parse(cls, text: str, size: int) -> Mesh:
        """Parses --mesh, for example "data=2,model=2", for `size` workers. `data`, if left out, takes what remains.

        Raises: ConfigError if the text is malformed or does not multiply to `size`; the message says what would fit.
        """
        degrees = degrees_of(text)
        others = math.prod(degree for axis, degree in degrees.items() if axis != "data")
        if "data" not in degrees and size % others == 0:
            degrees["data"] = size // others
        wanted = others * degrees.get("data", 1)
        if wanted != size:
            raise ConfigError(
                f"--mesh={text} needs {'a multiple of ' if 'data' not in degrees else ''}{wanted} workers, but there"
                f" {_are(size)}: {_fitting(degrees, others, wanted, size)}."
            )
        return cls.create(**degrees)

    @property
    def size(self) -> int:
        """The number of workers."""
        return math.prod(self.degrees)

    def degree(self, *axes: str) -> int:
        """The number of workers in a group along these axes."""
        return math.prod(self.degrees[AXES.index(axis)] for axis in axes)

    def by_axis(self) -> dict[str, int]:
        """axis -> degree, of all axes."""
        return dict(zip(AXES, self.degrees, strict=True))

    def stride(self, *axes: str) -> int:
        """The distance of neighboring ranks in a group along these axes, which must be adjacent in AXES."""
        places = sorted(AXES.index(axis) for axis in axes)
        assert places == list(range(places[0], places[-1] + 1)), axes
        return math.prod(self.degrees[places[-1] + 1 :])

    @property
    def replicas(self) -> int:
        """The number of model copies, which read different samples."""
        return self.degree(*REPLICA_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank: axis -> coordinate."""
        result = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, result[axis] = divmod(rank, degree)
        return {axis: result[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The inverse of `coordinates`; axes left out have coordinate 0."""
        result = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            result = result * degree + coordinates.get(axis, 0)
        return result

    def index(self, rank: int, *axes: str) -> int:
        """The position of a rank within its group along `axes`, in rank order."""
        return self.group(rank, *axes).index(rank)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks, in order, that share all coordinates with `rank` except along `axes`; without axes: `rank`."""
        place = self.coordinates(rank)
        free = [range(self.degree(axis)) if axis in axes else (place[axis],) for axis in AXES]
        return tuple(self.rank(dict(zip(AXES, at, strict=True))) for at in itertools.product(*free))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups along `axes`; every rank is in exactly one."""
        return sorted({self.group(rank, *axes) for rank in range(self.size)})

    def describe(self) -> str:
        """The axes with a degree above 1, for logs: "data=2,model=2"."""
        return (
            ",".join(f"{axis}={degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1)
            or "data=1"
        )


def fits(text: str, size: int) -> bool:
    """Whether `size` workers can have the mesh that --mesh asks for."""
    try:
        return bool(Mesh.parse(text, size))
    except ConfigError:
        return False


def _fitting(degrees: Mapping[str, int], others: int, wanted: int, size: int) -> str:
    """Suggests numbers of workers or axes that would fit, as the end of a sentence."""
    start = f"start {wanted}, or " if "data" in degrees else f"start {-(-size // others) * others}, or "
    if size % others == 0:
        return (
            start
            + "use --mesh="
            + ",".join(
                [f"data={size // others}", *(f"{axis}={degree}" for axis, degree in degrees.items() if axis != "data")]
            )
        )
    kept = {axis: math.gcd(degree, size) for axis, degree in degrees.items() if axis != "data"}
    while size % math.prod(kept.values()):
        kept.popitem()
    rest = size // math.prod(kept.values())
    return (
        start
        + "use --mesh="
        + ",".join([f"data={rest}", *(f"{axis}={degree}" for axis, degree in kept.items() if degree > 1)])
    )


def _are(size: int) -> str:
    return "is 1" if size == 1 else f"are {size}"
