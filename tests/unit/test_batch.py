"""Packing and dealing of batches, on small cases written out."""

import numpy as np

from keepstep.actor.batch import deal, pack


def test_pack_places_log_probs_one_before_their_token():
    batch = pack([[5, 6], [7]], [[8], [9, 10]], [[-0.5], [-1.0, -2.0]], pad_id=0)
    assert batch.tokens.tolist() == [[5, 6, 8], [7, 9, 10]]
    assert batch.mask.tolist() == [[0, 1], [1, 1]]
    np.testing.assert_array_equal(batch.engine_log_probs, np.array([[0, -0.5], [-1, -2]], dtype=np.float32))


def test_pack_accepts_an_empty_response():
    batch = pack([[5, 6], [7, 8]], [[], [9]], [[], [-1.0]], pad_id=3)
    assert batch.tokens.tolist() == [[5, 6, 3], [7, 8, 9]]
    assert batch.mask.tolist() == [[0, 0], [0, 1]]


def test_deal_gives_each_mini_batch_the_same_prompts_on_any_world_size():
    one = deal(num_prompts=4, group_size=2, mini_batch_size=2, world_size=1)
    two = deal(num_prompts=4, group_size=2, mini_batch_size=2, world_size=2)
    assert one == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert two == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    for mini in range(2):
        assert sorted(one[0][mini]) == sorted(two[0][mini] + two[1][mini])
