"""Which errors are those of a rank that is gone."""

import pytest

from sparsekv.formats.distributed.group import is_lost_rank

GLOO = "[external/gloo/transport/tcp/pair.cc:555] Connection closed by peer [127.0.0.1]:48105"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp: remote process exited or there was a network error"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError(NCCL), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("closed by peer"), False),
    ],
    ids=["gloo", "nccl", "another", "another-class"],
)
def test_a_lost_rank_is_known_by_what_the_backends_say(error: Exception, lost: bool) -> None:
    assert is_lost_rank([ValueError("first"), error]) is lost
