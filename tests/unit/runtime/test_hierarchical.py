"""Over which hosts groups may be spread for --all_reduce=hierarchical."""

import pytest

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.hierarchical import check_hosts

STAGES = [(0, 1, 2, 3), (4, 5, 6, 7)]  # pipe=2,data=4


@pytest.mark.parametrize("hosts", ["aaaabbbb", "aabbccdd", "aabbbbaa", "abababab", "abcdabcd", "aaaabcde"])
def test_groups_that_are_spread_alike_add_up_in_the_same_order(hosts):
    check_hosts(STAGES, STAGES, hosts)


@pytest.mark.parametrize("hosts", ["aaaabbcc", "aabbabab"])
def test_copies_would_drift_apart_where_hosts_bracket_the_sums_differently(hosts):
    check_hosts(STAGES, [], hosts)
    with pytest.raises(ConfigError, match="ranks 0 on a, .* hold copies .* use --all_reduce=flat"):
        check_hosts(STAGES, STAGES, hosts)


def test_every_rank_is_told_of_a_group_that_is_uneven():
    """A rank of the first stage, which is on one host, would wait for the others."""
    with pytest.raises(ConfigError, match="of ranks 4, 5, 6, 7 b has 3, c has 1"):
        check_hosts(STAGES, [], "aaaabbbc")
