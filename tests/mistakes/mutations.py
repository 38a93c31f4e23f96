"""draw(seed, number) -> a mistake: always the same one."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.mistakes import clusters, folders, scripts, tools, train_flags, user_code
from tests.mistakes.mistake import Mistake

# family -> its weight in the draw. In total, mistakes that are found at once are as frequent as those that train first.
FAMILIES: dict[Callable[[random.Random], Mistake], int] = {
    train_flags.number: 7,
    train_flags.name: 2,
    train_flags.choice: 2,
    train_flags.boolean: 1,
    train_flags.form: 1,
    train_flags.text: 9,
    train_flags.contradiction: 4,
    train_flags.odd_text: 3,
    train_flags.flag_file: 4,
    clusters.tf_config: 5,
    clusters.surely_wrong: 3,
    clusters.peers: 2,
    clusters.engine: 3,
    clusters.environment: 2,
    clusters.of_a_store: 1,
    clusters.between_workers: 3,
    user_code.function: 22,
    user_code.file: 3,
    folders.damaged: 3,
    folders.all_damaged: 2,
    folders.sealed: 4,
    folders.other_file: 4,
    folders.logs: 2,
    folders.mixed_up: 4,
    folders.backup: 1,
    folders.records: 4,
    folders.texts: 2,
    folders.synthetic: 2,
    tools.number: 4,
    tools.huge: 1,
    tools.name: 2,
    tools.choice: 1,
    tools.curated: 9,
    scripts.script: 9,
}


def draw(seed: int, number: int) -> Mistake:
    chance = random.Random(f"{seed}, {number}")
    (family,) = chance.choices(list(FAMILIES), weights=list(FAMILIES.values()))
    return family(chance)
