"""Where a run stands in its data: samples, epochs, what rollbacks passed over, another batch."""

from tfdist.run.progress import Progress


def test_samples_and_epochs_follow_from_steps():
    progress = Progress(8, 32)
    assert (progress.consumed(3), progress.trained(3), progress.epochs(3)) == (24, 24, 0.75)
    assert Progress(8, None).epochs(3) is None


def test_what_is_passed_over_is_consumed_and_not_trained_on():
    progress = Progress(8, 32)
    progress.pass_over(16)
    assert progress.manifest_fields(5) == {"consumed": 56, "skipped_samples": 16, "passed_over": 16}
    assert (progress.trained(5), progress.epochs(5)) == (40, 1.25)


def test_another_batch_goes_on_where_the_first_one_stopped():
    before = Progress(8, 32)
    before.pass_over(16)
    after = Progress(4, 32)
    after.restore(before.manifest_fields(5), 5)
    assert after.consumed(5) == before.consumed(5) and after.trained(5) == before.trained(5)
    assert after.consumed(6) == before.consumed(5) + 4
    again = Progress(4, 32)
    again.restore(after.manifest_fields(6), 6)
    assert (again.consumed(7), again.trained(7)) == (after.consumed(7), after.trained(7))


def test_a_manifest_of_an_earlier_version_had_one_batch_only():
    progress = Progress(8, 32)
    progress.restore({"consumed": 56, "skipped_samples": 16}, 5)
    assert progress.consumed(5) == 56 and progress.trained(5) == 40
