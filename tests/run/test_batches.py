from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from accumulus.run.batches import Batches


@given(size=st.integers(1, 60), batch_size=st.integers(1, 70), seed=st.integers(0, 5))
def test_every_epoch_holds_every_sample_once(size, batch_size, seed):
    batches = Batches(range(size), batch_size=batch_size, seed=seed)
    for epoch in range(2):
        steps = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
        seen = [sample for step in steps for sample in batches[step]]
        assert Counter(seen) == Counter(range(size))


def test_a_batch_depends_on_seed_and_step_alone():
    batches = Batches(range(100), batch_size=7, seed=1)
    in_order = [batches[step] for step in range(40)]
    again = Batches(range(100), batch_size=7, seed=1)
    assert [again[step] for step in reversed(range(40))] == in_order[::-1]
    assert Batches(range(100), batch_size=7, seed=2)[0] != in_order[0]
    assert in_order[0] != in_order[batches.per_epoch]


def test_sorting_by_length_keeps_the_samples():
    words = ["a" * (number % 9) for number in range(50)]
    plain = Batches(words, batch_size=20, seed=0)[0]
    by_length = Batches(words, batch_size=20, seed=0, length=len)[0]
    assert by_length == sorted(plain, key=len, reverse=True)


def test_fingerprints_tell_samples_apart():
    from accumulus.run.batches import fingerprint

    data = [b"one", b"two"]
    assert fingerprint(data) == fingerprint(list(data))
    assert len({fingerprint(x) for x in (data, [b"one", b"twp"], [b"onet", b"wo"], data[:1], [1, 2])}) == 5
