"""Decoding over losses: what is counted, controls without losses, resuming, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from lossytp.tolerance.config import ToleranceConfig
from lossytp.tolerance.decode import DECODING, Decoder, degenerates, first_difference, load_decoded
from lossytp.tolerance.measure import Measurement

pytestmark = pytest.mark.slow


def config(folder: Path, **changes: Any) -> ToleranceConfig:
    few: dict[str, Any] = {"text": "stdlib", "prompts": 2, "prompt_tokens": 8, "new_tokens": 6, "prefix_tokens": 2}
    rows = {"loss_rates": "0.3", "repairs": "zero", "decode": True, "decode_draws": 2}
    return ToleranceConfig(**few | rows | {"output_dir": str(folder)} | changes)


def rows(given: ToleranceConfig) -> list[dict]:
    return list(Decoder(given).rows(load_decoded(given), lambda: None))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        *(([*range(32)], False), ([1] * 32, True), ([1, 2, 3] * 10, True)),
        ([*range(16), *range(12)], False),  # 9 of 25 4-grams
        ([*range(10), *range(16)], False),  # 7 of 23
        ([*range(10)] * 2 + [20], False),  # 7 of 18
        ([*range(10)] * 3, True),  # 17 of 27
    ],
)
def test_a_continuation_degenerates_if_half_of_its_4_grams_are_repeated(tokens: list[int], expected: bool) -> None:
    assert degenerates(tokens) is expected


def test_tokens_before_the_first_difference_are_counted() -> None:
    assert [first_difference(each, [1, 2, 3]) for each in ([1, 2, 3], [1, 2, 0], [0, 2, 3])] == [3, 2, 0]


@pytest.mark.parametrize("phases", ["reduce", "both"])
def test_without_losses_every_prefill_gives_the_dense_continuation(tmp_path: Path, phases: str) -> None:
    found = rows(config(tmp_path, loss_rates="0,0.5", phases=phases))
    assert [row["prefill"] for row in found] == ["lossy", "prefix", "reliable"] * 2
    for row in found[:3]:
        assert row["same"]["value"] == 6
        assert row["rise"]["value"] == pytest.approx(0, abs=1e-5)
    for row in found[3:]:
        assert row["same"]["value"] < 6, "control"
        assert row["rise"]["value"] > 0.01, "control"


def test_packets_follow_from_width_dtype_and_ranks(tmp_path: Path) -> None:
    """gpt2-nano has 128 units in 4 blocks: 8 messages a token, 32 elements from each of 4 ranks to each other one."""
    decoder = Decoder(config(tmp_path, loss_rates="0.001"))
    assert "128 elements of 4 bytes" in (words := decoder.message_of_a_token())
    assert "12 links, in 12 packets of at most 364 elements" in words
    assert "and the sum back over 12 links, in 12 packets, which are neither lost nor counted. A token" in words
    assert words.endswith("A token has 8 messages.")
    both = Decoder(config(tmp_path, loss_rates="0.001", phases="reduce,both")).message_of_a_token()
    assert "and the sum back over 12 links, in 12 packets. A token" in both
    lossy, prefix, reliable = decoder.rows({}, lambda: None)
    elements, new = 128 * 3 * 8, 5  # a message sends 3/4 of 4 contributions; the last token is not sent
    of_prompt = {8: 8 * 12 * -(-8 * 32 // 364), 6: 8 * 12 * -(-6 * 32 // 364), 0: 0}
    assert elements / 364 < 12 * 8
    for row, prompt in ((lossy, 8), (prefix, 6), (reliable, 0)):
        assert row["packets"] == pytest.approx((of_prompt[prompt] + new * 12 * 8) / 6)


def test_finished_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rows(config(tmp_path))
    record = json.loads((tmp_path / DECODING).read_text())
    assert record["rows"] == first
    measured: list[str] = []
    original = Decoder._row

    def counted(self: Decoder, *args: Any) -> Any:
        measured.append(args[0].repair)
        return original(self, *args)

    monkeypatch.setattr(Decoder, "_row", counted)
    both = rows(config(tmp_path, repairs="zero,retransmit(2)"))
    assert both[:3] == first
    assert measured == ["retransmit(2)"] * 3
    with pytest.raises(ValueError, match="new_tokens = 6, not 7"):
        rows(config(tmp_path, new_tokens=7))


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt_tokens \+ new_tokens = .* positions"):
        Measurement(config(tmp_path, new_tokens=100_000))
