from lossytp.training import rows as hub


def test_a_hub_is_asked_again_a_minute_after_its_last_answer(monkeypatch):
    now, asked = [59.9], []
    monkeypatch.setattr(hub, "_HUB", hub._Hub())
    monkeypatch.setattr(hub, "_ask_hub", lambda: bool(asked.append(now[0])))
    monkeypatch.setattr(hub.time, "monotonic", lambda: now[0])
    for now[0] in (59.9, 60.1, 119.8, 120.0, 150.0):
        assert not hub.hub_answers()
    assert asked == [59.9, 120.0]
