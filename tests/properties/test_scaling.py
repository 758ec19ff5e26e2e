"""Loss scaling: powers of two go in and out of the exchange without a trace, to the bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracle.backends import Backend, each_backend
from oracle.examples import examples
from oracle.jobs import jobs, steps
from oracle.world import World, same_bits


@each_backend
@examples(20)
@given(data=st.data())
def test_a_gain_scales_what_is_delivered_and_nothing_else(
    backend: Backend, data: st.DataObject
) -> None:
    job = data.draw(jobs(dtypes=["float32", "float64"]))
    gains = data.draw(st.lists(st.sampled_from([0.25, 1.0, 2.0, 1024.0]), min_size=3, max_size=3))
    scaled, plain = (World(job.plan, job.ranks, backend) for _ in range(2))
    for gain, gradients in zip(gains, data.draw(steps(job, 3)), strict=True):
        exchanged, expected = scaled.exchange(gradients, gain), plain.exchange(gradients)
        for one, other in zip(exchanged, expected, strict=True):
            for name, g in one.items():
                normal = np.abs(other[name]) >= 4 * np.finfo(g.dtype).tiny
                normal |= other[name] == 0
                assert np.array_equal(g[normal], other[name][normal] * g.dtype.type(gain))
        assert scaled.commit() == plain.commit()
    assert same_bits(scaled.owed(), plain.owed())
