"""The mistakes of the default suite, as (seed, number)."""

FIXED: tuple[tuple[int, int], ...] = ()
