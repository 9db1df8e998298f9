"""Number of servers that autoscaling sets."""

from octavo.router.autoscale import Scale


def looks(scale, loads, count=1):
    """Return the number of servers after each check."""
    counts = []
    for load in loads:
        count = scale.look(load, count)
        counts.append(count)
    return counts


def test_load_that_stays_starts_servers():
    assert looks(Scale(1, 8, 10), [25] * 4) == [1, 1, 3, 3]
    assert looks(Scale(1, 2, 10), [1000] * 9)[-1] == 2


def test_a_peak_does_not():
    assert set(looks(Scale(1, 8, 10), [0, 0, 25, 0, 0, 0])) == {1}


def test_servers_end_one_by_one_when_there_has_been_no_work_for_long():
    counts = looks(Scale(1, 8, 10), [0] * 200, count=3)
    assert (counts[58], counts[59], counts[118], counts[119], counts[-1]) == (3, 2, 2, 1, 1)


def test_work_now_and_then_keeps_them():
    assert set(looks(Scale(1, 8, 10), [15 if i % 30 == 0 else 0 for i in range(200)], 2)) == {2}
