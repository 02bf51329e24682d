"""Requests between SGLang's own pools, in two processes over NIXL, compared byte by byte."""

import pytest

from tests.engines.sglang.processes import Deployment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

SUCCESS = 4
KINDS = ["mha", "mla", "dsa", "swa", "gdn", "kimi"]


def check(pair: Deployment, tokens: int, prefix: int = 0, chunks: int = 2) -> None:
    sent, received = pair.both("transfer", room=pair.room(), tokens=tokens, prefix=prefix, chunks=chunks)
    assert set(sent["statuses"]) == {SUCCESS}, (sent["reasons"], received["reasons"])
    assert set(received["statuses"]) == {SUCCESS}, received["reasons"]
    assert received["wrong"] == []


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)], ids=["1-1", "2-1", "1-2"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_pool_over_every_pair_of_tp_sizes(pair: Deployment, name: str, prefill: int, decode: int) -> None:
    pair.open(name, {"tp_size": prefill}, {"tp_size": decode})
    check(pair, tokens=200, chunks=3)


@pytest.mark.parametrize(("prefill", "decode"), [(4, 2), (2, 4)], ids=["4-2", "2-4"])
@pytest.mark.parametrize("name", ["mha", "gqa", "mla"])
def test_more_ranks(pair: Deployment, name: str, prefill: int, decode: int) -> None:
    """`gqa` has more ranks than heads on one side."""
    pair.open(name, {"tp_size": prefill}, {"tp_size": decode})
    check(pair, tokens=70)


@pytest.mark.parametrize(("tokens", "prefix"), [(200, 0), (333, 256), (65, 0), (513, 512)])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {"tp_size": 2, "dcp_size": 2}),
        ({"tp_size": 2, "dcp_size": 2}, {}),
        ({"tp_size": 2, "dcp_size": 2}, {"tp_size": 4, "dcp_size": 4}),
        ({"tp_size": 2, "dcp_size": 2}, {"tp_size": 2, "dcp_size": 2}),
    ],
    ids=["1-2", "2-1", "2-4", "2-2"],
)
@pytest.mark.parametrize("name", ["mla", "dsa"])
def test_tokens_that_ranks_share(
    pair: Deployment, name: str, prefill: dict[str, int], decode: dict[str, int], tokens: int, prefix: int
) -> None:
    """Decode context parallelism: rows are those of SGLang's `localize_dcp_indices`; every rank has all of an index."""
    pair.open(name, prefill, decode)
    check(pair, tokens, prefix)


@pytest.mark.parametrize("name", ["mha", "dsa"])
def test_pipeline_stages(pair: Deployment, name: str) -> None:
    pair.open(name, {"pp_size": 2}, {})
    check(pair, tokens=70)


@pytest.mark.parametrize("name", ["draft on both", "draft on decode", "draft on prefill"])
def test_draft_layers(pair: Deployment, name: str) -> None:
    """Decode works without draft layers that prefill does not have."""
    pair.open(name, {"tp_size": 2 if name == "draft on both" else 1}, {})
    check(pair, tokens=70)


@pytest.mark.parametrize(
    ("name", "tokens", "prefix"),
    [("mha", 70, 32), ("mha", 64, 64), ("dsa", 200, 64), ("swa", 150, 128), ("page 1", 15, 3)],
    ids=["mha", "whole prompt", "dsa", "window reaches back", "pages of one token"],
)
def test_prefix_that_decode_has(pair: Deployment, name: str, tokens: int, prefix: int) -> None:
    pair.open(name, {}, {})
    check(pair, tokens, prefix, chunks=1 if tokens == prefix else 2)


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "tokens", "prefix"),
    [
        ("dsa tail", {}, {}, 811, 256),
        ("dsa tail", {"tp_size": 2}, {"tp_size": 1}, 812, 0),
        ("dsa tail with extra entries", {"pp_size": 2}, {"tp_size": 2}, 811, 0),
        ("mxfp8", {"tp_size": 2}, {"tp_size": 2}, 300, 128),
        ("mxfp8 with a window", {}, {}, 300, 128),
        ("minimax", {"tp_size": 2}, {"tp_size": 2}, 70, 32),
        ("qsa", {"tp_size": 2}, {"tp_size": 2}, 70, 32),
    ],
)
def test_states_whose_content_is_not_known(
    pair: Deployment, name: str, prefill: dict[str, int], decode: dict[str, int], tokens: int, prefix: int
) -> None:
    """Whole items; those of a prefix that decode has are left alone, although SGLang lists them."""
    pair.open(name, prefill, decode)
    check(pair, tokens, prefix)


@pytest.mark.parametrize("name", ["minimax", "mxfp8", "qsa"])
def test_states_whose_content_is_not_known_need_equal_tp_sizes(pair: Deployment, name: str) -> None:
    pair.open(name, {"tp_size": 2}, {"tp_size": 1})
    with pytest.raises(AssertionError, match=r"TP|no prefill rank has this part"):
        check(pair, tokens=70)


def test_other_rows_of_metadata_are_refused_before_anything_is_sent(pair: Deployment) -> None:
    """Of `--disaggregation-enable-kv-checksum` on one side, for example."""
    pair.open("mha", {}, {"has_checksum": True})
    sent, received = pair.both("transfer", room=pair.room(), tokens=70, timeout_s=20)
    for side in (sent, received):
        assert "fingerprint" in side["reasons"][0]
