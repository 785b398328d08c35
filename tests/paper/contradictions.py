"""Changes of the results that contradict the paper's claims."""


def rows_of(rows, **wanted):
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    assert found, wanted
    return found


def set_in(rows, values, **wanted):
    """Set values in the rows that have the wanted ones."""
    for row in rows_of(rows, **wanted):
        row.update(values)


SST2 = "sst2_held_out"  # each claim is of both tasks; changing one must suffice
FEW = "protect(0.01) + hadamard(64)"
ADVISED = "protect(0.1) + retransmit(1)"
PRETRAINED = "losses on the way to a sum"
BOTH = "losses on both ways"


def arm_of(experiment, values, **wanted):
    """Return a change that sets values in an experiment's rows."""
    return lambda r: set_in(r["comparisons"][experiment], values, **wanted)


def row_in(section, values, **wanted):
    """Return a change that sets values in a section's rows."""
    return lambda r: set_in(r[section], values, **wanted)


def gpt2_in(section, values, **wanted):
    """Return a change that sets values in a section's rows of pretraining GPT-2's shape."""
    return lambda r: set_in(r["pretraining_gpt2"][section], values, **wanted)


def exponent_of(cost, loss_rate, *, against="parameters", **values):
    """Return a change of the exponent of a cost against size, or tokens."""
    return lambda r: set_in(r["sizes"]["exponents"], values, against=against, cost=cost, loss_rate=loss_rate)


TIMES_TOKENS = [f"{evaluation}_times_tokens{axis}" for evaluation in ("clean", "lossy") for axis in ("", "_linear")]
MUCH = {"kilobytes": 1250.0, "times": 2.0}
AT_TEN = {"model_name": "gpt2-nano", "whole_packets": False, "loss_rate": 0.1}
TWICE = 20_480_000  # tokens: the longest pretraining of the comparison of sizes
CONTRADICT = {  # for each claim, changes that each contradict another of its conditions
    "small_losses_cost_nothing": [
        row_in("tolerance_contrasts", {"low": -0.011}, task=SST2, loss_rate=0.001),
        row_in("tolerance_contrasts", {"p_holm": 0.04}, task=SST2, loss_rate=0.01),
        row_in("tolerance_contrasts", {"task": "another"}, task=SST2),
    ],
    "both_phases_cost_more": [
        lambda r: r["law_both_phases"].update({SST2: [0.9] * 9}),
        lambda r: r["law_both_phases"].update({"docstrings": [0.9, 2.0]}),
    ],
    "one_law": [
        row_in("law_arms", {"squared_error": 9.0}, task=SST2, both_phases=False, algorithm="tree"),
        lambda r: r["law"][SST2].update(r_squared=0.96),
        lambda r: r["law_elsewhere"][SST2].update(missing_share=1.0),
    ],
    "law_misses_rings": [
        row_in("predictions", {"measured": 1.0}, predictor="squared error", arm="tree, 4 ranks", loss_rate=0.07),
        row_in("predictions", {"low": -1.0, "high": 1.0}),  # none is missed
    ],
    "law_predicts_the_real_model": [
        row_in("real_networks", {"median": 3.0}, algorithm="ring", phase="reduce", loss_rate=0.1),
        row_in("real_networks", {"median": 0.5}, algorithm="direct", phase="both", loss_rate=0.03),
        row_in("real_networks_later", {"times_law": 1.0}, phase="both"),
        lambda r: [row.update(median_by_loss_rate=row["median"]) for row in r["real_networks"]],
    ],
    "law_covers_repairs": [
        row_in("real_repairs", {"times_law": 1.2}, repair="rescale"),
        row_in("real_repairs", {"times_law": 0.8}, repair="local"),
        row_in("real_repairs", {"times_law": 1.5}, repair="hadamard(64)", loss_rate=0.03),
        row_in("real_repairs", {"times_law": 2.5}, repair="hadamard(64)", loss_rate=0.03),
        row_in("real_repairs", {"times_law": 0.9}, repair=FEW, loss_rate=0.03),
        row_in("real_repairs", {"times_law": 0.5}, repair=FEW, loss_rate=0.03),
    ],
    "law_fails_at_small_losses": [
        row_in("real_networks_later", {"times_law": 1.2}, loss_rate=0.001),
        row_in("real_networks_later", {"loss_rate": 0.002}, phase="reduce"),
    ],
    "training_is_not_shown_to_help": [
        row_in("real_training_gains", {"low": 0.001}, contrast="training under loss", task="sst2"),
        row_in("real_training_gains", {"low": 0.001}, contrast="training under loss", task="qnli"),
        row_in("real_training_gains", {"low": 0.001}, contrast="protected training, a tenth", task="qnli"),
        row_in("real_training_gains", {"low": 0.001}, contrast="protected training, a tenth", task="sst2"),
        row_in("real_training_gains", {"high": 0.001}, contrast="training under loss", task="sst2"),
        row_in("real_training_gains", {"p_holm": 0.01}, contrast="training under loss", task="sst2"),
    ],
    "strong_packets_mostly_stay": [
        row_in("real_training", {"strongest": 20.0}, trained_over="zero", task="sst2"),
        row_in("real_training", {"weakest": 900.0}, trained_over="zero", task="qnli"),
        row_in("real_training", {"weakest": 900.0}, trained_over="zero", task="sst2"),
    ],
    "protected_training_helps_a_weaker_repair": [
        row_in("real_training_gains", {"low": -0.01}, contrast="protected training, a hundredth", task="sst2"),
        row_in("real_training_gains", {"p_holm": 0.06}, contrast="protected training, a hundredth", task="sst2"),
        row_in("real_training_gains", {"low": 0.01}, contrast="protected training, a hundredth", task="qnli"),
    ],
    "hadamard_does_not_help_fine_tuning": [
        arm_of("13_real_model_rates", {"difference": -0.01}, arm="hadamard(64), 10%"),
    ],
    "retransmission_keeps_accuracy": [
        arm_of("13_real_model_advised", {"low": -0.021}, arm="protect(0.1) + retransmit(1)"),
        arm_of("13_real_model_advised", {"high": -0.001}, arm="protect(0.1) + retransmit(1)"),
        arm_of("13_real_model_advised", {"seeds": 3}, arm="protect(0.1) + retransmit(1)"),
    ],
    "protection_helps_in_qnli": [
        row_in("real_training_gains", {"low": -0.001}, contrast="a tenth", task="qnli"),
        row_in("real_training_gains", {"low": 0.001}, contrast="a hundredth", task="qnli"),
        row_in("real_training_gains", {"p_holm": 0.01}, contrast="a tenth", task="qnli"),
    ],
    "protection_must_cover_every_text": [
        row_in("real_training_gains", {"high": 0.01}, contrast="a hundredth", task="sst2"),
        row_in("real_training_gains", {"low": -0.01}, contrast="a tenth, not a hundredth", task="sst2"),
        row_in("real_training_gains", {"low": -0.001}, contrast="a tenth", task="sst2"),
        row_in("real_training_gains", {"p_holm": 0.01}, contrast="a tenth", task="sst2"),
        row_in("real_training_gains", {"p_holm": 0.06}, contrast="a hundredth", task="sst2"),
        row_in("real_training_gains", {"p_holm": 0.06}, contrast="a tenth, not a hundredth", task="sst2"),
    ],
    "falls_exceed_predictions": [
        lambda r: r.update(lossless_of_new_seeds=-0.001),
        row_in("prediction_scores", {"bias": -0.001}, predictor="inference rise", kind="all"),
    ],
    "inference_predicts_new_networks": [
        lambda r: r["shared_prediction_errors"].update({"inference rise": 0.05}),
        row_in("prediction_scores", {"covered": 39}, predictor="inference rise", kind="all"),
    ],
    "bytes_lost_together_cost_more": [
        row_in("together", {"high": 0.05}, task=SST2, bytes=4),
        row_in("together", {"fall": 0.04}, task="docstrings", bytes=4),
    ],
    "packet_size_matters": [
        row_in("packet_size", {"low": -0.001}, task=SST2, mtu_bytes=1500),
        arm_of("10_packets_again", {"gain_p_holm": 0.04}, task=SST2, arm="packets of 9000 bytes"),
    ],
    "law_holds_for_small_packets": [
        row_in("small_packets", {"high": 0.04}, loss_rate=0.3, repair="zero"),
        row_in("small_packets", {"low": 0.02}, loss_rate=0.1, repair="zero"),
        row_in("small_packets", {"high": 0.09}, loss_rate=0.3, repair="zero"),
    ],
    "hadamard_gains_little_in_small_packets": [
        arm_of("06_repair_of_small_packets", {"gain_p_holm": 0.01}, arm="hadamard(64)"),
        arm_of("06_repair_of_small_packets", {"gain_high": 0.03}, arm="hadamard(64)"),
    ],
    "protection_helps_with_small_packets": [
        arm_of("06_repair_of_small_packets", {"gain_p_holm": 0.06}, arm="protect(0.1) + hadamard(64)"),
        arm_of("06_repair_of_small_packets", {"gain": -0.01}, arm="protect(0.1) + hadamard(64)"),
    ],
    "longer_training_regains": [
        lambda r: r["regained"][0]["gain"].update(value=0.02),
        lambda r: r["regained"][0]["gain"].update(value=0.06),
        lambda r: r["regained"][0]["gain"].update(low=-0.001),
        lambda r: r["regained"][1]["gain"].update(low=0.005, high=0.009),
        lambda r: r["regained"][1].update(longer_steps=400),
    ],
    "lossy_averages_cost_more": [
        arm_of("05_replicas", {"high": -0.15}, arm="averaged over lossy links", task="docstrings"),
        arm_of("05_replicas", {"low": -0.25}, arm="never averaged", task="sst2_held_out"),
    ],
    "one_learning_rate_is_best": [
        lambda r: r["retuned"][0].update(at_edge=True),
        lambda r: r["retuned"][0].update(learning_rate_lossy=0.004),
        lambda r: r["tasks"]["docstrings"]["settings"].update(learning_rate=0.004),
    ],
    "no_floor_is_seen": [
        lambda r: set_in(r["slowdowns"]["30 %, reduce phase"]["shrunk"], {"low": -0.001}, steps=1800),
        lambda r: set_in(r["slowdowns"]["10 %, both phases"]["shrunk"], {"low": 0.001}, steps=1800),
        lambda r: set_in(r["slowdowns"]["10 %, both phases"]["shrunk"], {"low": 0.001}, steps=5400),
        lambda r: set_in(r["slowdowns"]["30 %, reduce phase"]["shrunk"], {"low": 0.001}, steps=5400),
    ],
    "a_fall_remains": [
        row_in("lengths", {"low": -0.001}, task="docstrings", network="10 %, both phases", max_steps=1800),
        row_in("lengths", {"low": 0.009}, task="docstrings", network="30 %, reduce phase", max_steps=1800),
        row_in("lengths", {"max_steps": 600}, task="docstrings", network="10 %, ring, reduce phase"),
        row_in("lengths", {"max_steps": 2000}, task="docstrings", max_steps=1800),
    ],
    "longest_training_gains_nothing": [
        lambda r: set_in(r["longest_changes"]["accuracy_lossy"], {"value": 0.001}, network=None),
        lambda r: set_in(r["longest_changes"]["accuracy_lossy"], {"high": 0.011}, network=None),
        lambda r: set_in(r["longest_changes"]["cross_entropy_clean"], {"low": -0.01}, network=None),
        lambda r: set_in(r["longest_changes"]["accuracy_lossy"], {"steps": 3600}, network=None),
    ],
    "a_fall_remains_then": [
        row_in("lengths", {"low": -0.001}, task="docstrings", network="30 %, reduce phase", max_steps=5400),
        row_in("lengths", {"max_steps": 4000}, task="docstrings", network="10 %, both phases", max_steps=5400),
        row_in("lengths", {"max_steps": 4000}, task="docstrings", network="10 %, ring, reduce phase", max_steps=5400),
    ],
    "budgets_grow_with_training": [
        lambda r: set_in(r["longer"], {"budget": {"value": 0.01}}, task="docstrings", name="600 steps"),
        lambda r: set_in(r["longer"], {"budget": {"value": 0.01}}, task="docstrings", name="1800 steps"),
        lambda r: set_in(r["longer"], {"name": "other"}, task="docstrings", name="1800 steps"),
    ],
    "losses_do_more_than_delay": [
        lambda r: r["slowdowns"]["30 %, reduce phase"]["growth"][-1].update(low=0.9),
        lambda r: r["slowdowns"]["10 %, both phases"]["growth"][-1].update(low=0.9),
        lambda r: r["slowdowns"]["10 %, reduce phase"]["growth"][-1].update(low=1.01),
    ],
    "pretraining_loses_nats": [
        row_in("pretraining", {"clean_low": -0.01}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"lossy_low": -0.01}, arm=PRETRAINED, loss_rate=0.1),
    ],
    "pretraining_wastes_tokens": [
        row_in("pretraining", {"clean_times_tokens": 1.63}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"clean_times_tokens_low": 1.29}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"clean_times_tokens_high": 1.8}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"lossy_times_tokens": 1.5}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"lossy_times_tokens_low": 1.4}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"lossy_times_tokens_high": 2.1}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"lossy_times_tokens": None}, arm=PRETRAINED, loss_rate=0.1),
    ],
    "pretraining_fails_over_both_phases": [
        row_in("pretraining", {"clean_low": 0.9}, arm=BOTH, loss_rate=0.1),
        row_in("pretraining", {"clean_low": 0.9}, arm=BOTH, loss_rate=0.03),
        row_in("pretraining", {"clean_times_tokens": 1.9}, arm=BOTH, loss_rate=0.03),
        row_in("pretraining_turns", {"last": 6.2}, loss_rate=0.03, seed=0),
        row_in("pretraining_turns", {"lossless_rise": 0.1}, loss_rate=0.03, seed=0),
        row_in("pretraining_turns", {"repair": "another"}, loss_rate=0.03, seed=0),  # two seeds are left
        row_in("pretraining", {"clean_high": 3.0}, arm="no loss in half the steps"),
    ],
    "one_per_cent_over_both_phases_wastes_half": [
        row_in("pretraining", {"clean_low": 0.4}, arm=BOTH, loss_rate=0.01),
        row_in("pretraining", {"clean_high": 3.0}, arm="no loss in half the steps"),
        row_in("pretraining_turns", {"last": 7.0, "lossless_rise": -1.0}, loss_rate=0.01, sequence_parallel=False),
    ],
    "training_diverges_as_the_rate_rises": [
        row_in("pretraining_turns", {"step": 120}, seed=1, repair="zero"),
        row_in("pretraining_turns", {"last": 6.0}, seed=0, repair="zero"),
        row_in("pretraining_turns", {"loss_rate": 0.03}, seed=2, repair="zero"),  # two seeds are left
        row_in("pretraining_turns", {"mtu_bytes": 216}, seed=2, repair="zero"),
        row_in("pretraining_turns", {"sequence_parallel": True}, seed=2, repair="zero"),
    ],
    "hadamard_softens_the_failure": [
        row_in("pretraining", {"clean": 0.4}, arm=f"{BOTH} with Hadamard"),
        row_in("pretraining", {"clean_high": 2.4}, arm=f"{BOTH} with Hadamard"),
        row_in("pretraining", {"clean_high": 3.0}, arm="no loss in half the steps"),
        row_in("pretraining", {"clean_low": 0.9}, arm=BOTH, loss_rate=0.1),
        row_in("pretraining", {"clean_low": 0.5}, arm=f"{BOTH} with Hadamard"),
        row_in("pretraining_turns", {"last": 7.0}, repair="hadamard(64)"),
    ],
    "a_sharded_stream_trains": [
        row_in("pretraining", {"clean_high": 0.6}, arm=f"{BOTH} of a sharded stream", loss_rate=0.1),
        row_in("pretraining", {"clean_high": 0.4}, arm=f"{BOTH} of a sharded stream", loss_rate=0.01),
        row_in("pretraining", {"clean_low": 0.01}, arm=f"{BOTH} of a sharded stream", loss_rate=0.01),
        row_in("pretraining", {"lossy_low": -0.01}, arm=f"{BOTH} of a sharded stream", loss_rate=0.01),
        row_in("pretraining", {"clean": 0.04}, arm=PRETRAINED, loss_rate=0.01),
        row_in("pretraining", {"clean_low": 0.24}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"clean": 0.3}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining_turns", {"last": 6.0}, loss_rate=0.1, sequence_parallel=True, seed=1),
        row_in("pretraining_turns", {"mtu_bytes": 216}, loss_rate=0.1, sequence_parallel=True, seed=1),
        row_in("pretraining", {"clean_low": 0.1}, arm="no loss in half the steps"),
        row_in("pretraining", {"clean_low": 0.1}, arm=BOTH, loss_rate=0.1),
        row_in("pretraining", {"clean_low": 0.1}, arm=f"{BOTH} with Hadamard"),
    ],
    "sharding_helps_less_in_fine_tuning": [
        arm_of("03_algorithms", {"high": -0.01}, arm="sequence-parallel, both phases", task=SST2),
        arm_of("03_algorithms", {"low": -0.2}, arm="direct, 4 ranks", task="docstrings"),
        arm_of("03_algorithms", {"arm": "another"}, arm="sequence-parallel, both phases", task=SST2),
    ],
    "the_shape_of_gpt2_fails_too": [
        gpt2_in("arms", {"clean_low": 0.4}, arm=BOTH),
        gpt2_in("turns", {"last": 6.3}, mtu_bytes=1500, seed=0),
        gpt2_in("turns", {"lossless_rise": 0.9}, mtu_bytes=1500, seed=0),
        gpt2_in("departures", {"step": 260}, network="no repair", seed=1),
        gpt2_in("departures", {"step": None}, network="no repair", seed=0),
        gpt2_in("departures", {"network": "another"}, network="no repair", seed=2),  # two seeds are left
    ],
    "larger_packets_fail_sooner": [
        gpt2_in("departures", {"step": 200}, network="jumbo packets", seed=1),
        gpt2_in("departures", {"step": None}, network="jumbo packets", seed=0),
        gpt2_in("departures", {"step": 180}, network="no repair", seed=1),
        gpt2_in("departures", {"network": "another"}, network="jumbo packets", seed=1),  # one seed is left
        gpt2_in("rises", {"clean": 0.4}, arm=f"{BOTH} in jumbo packets", seed=0),
    ],
    "hadamard_recovers_some_in_pretraining": [
        row_in("pretraining", {"clean": 0.26}, arm=f"{PRETRAINED} with Hadamard"),
        row_in("pretraining", {"clean": 0.12}, arm=f"{PRETRAINED} with Hadamard"),
        row_in("pretraining", {"clean_high": 0.22}, arm=f"{PRETRAINED} with Hadamard"),
    ],
    "lower_rates_waste_fewer_tokens": [
        row_in("pretraining", {"clean": 0.05}, arm=PRETRAINED, loss_rate=0.01),
        row_in("pretraining", {"clean": 0.02}, arm=PRETRAINED, loss_rate=0.03),
        row_in("pretraining", {"clean_low": -0.001}, arm=PRETRAINED, loss_rate=0.03),
        row_in("pretraining", {"clean_times_tokens": 1.2}, arm=PRETRAINED, loss_rate=0.01),
    ],
    "losing_pays_at_low_rates": [
        row_in("pretraining", {"lossy_times_tokens_high": 1.4}, arm=PRETRAINED, loss_rate=0.01),
        row_in("pretraining", {"clean_times_tokens_linear_high": None}, arm=PRETRAINED, loss_rate=0.03),
        row_in("pretraining", {"waiting": [{"kilobytes": 1250.0, "times": 1.01}]}, arm=PRETRAINED, loss_rate=0.03),
        row_in("pretraining", {"lossy_times_tokens": 1.2}, arm=PRETRAINED, loss_rate=0.03),
        row_in("pretraining", {"lossy_times_tokens": 1.11}, arm=PRETRAINED, loss_rate=0.01),
    ],
    "waiting_beats_more_tokens": [
        row_in("pretraining", {"clean_times_tokens_linear_low": 1.0}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"lossy_times_tokens_low": None}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {f"{each}_low": 1.5 for each in TIMES_TOKENS}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"waiting": [{"kilobytes": 125.0, "times": 1.5}, MUCH]}, arm=PRETRAINED, loss_rate=0.1),
        row_in("pretraining", {"lossy_times_tokens": 2.9}, arm=PRETRAINED, loss_rate=0.1),
    ],
    "rises_shrink_with_size": [
        exponent_of("rise", 0.1, high=0.01),
        exponent_of("rise, whole packets", 0.1, high=0.01),
        exponent_of("rise", 0.03, high=-0.01),
        exponent_of("rise", 0.3, high=0.01),
        exponent_of("rise, whole packets", 0.3, value=-0.2),
        lambda r: set_in(r["sizes"]["rises"], {"rise": 0.06}, model_name="gpt2-micro", whole_packets=False),
        lambda r: set_in(r["sizes"]["rises"], {"rise": 0.08}, model_name="gpt2-micro", whole_packets=False),
    ],
    "falls_shrink_with_size": [
        exponent_of("fall", 0.3, high=0.01),
        lambda r: set_in(r["sizes"]["falls"], {"fall": 0.01}, model_name="gpt2-micro"),
    ],
    "rises_grow_with_tokens": [
        exponent_of("rise", 0.1, against="tokens", low=0.9),
        exponent_of("rise, whole packets", 0.1, against="tokens", low=0.9),
        lambda r: set_in(r["sizes"]["rises"], {"rise": 0.5}, **AT_TEN, tokens=TWICE),
    ],
    "falls_are_not_shown_to_grow_with_tokens": [
        exponent_of("fall", 0.3, against="tokens", low=0.01),
        exponent_of("fall", 0.3, against="tokens", low=None),
        lambda r: set_in(r["sizes"]["falls"], {"fall": 0.01}, model_name="gpt2-nano", tokens=TWICE),
    ],
    "the_longest_trained_falls_most": [
        lambda r: set_in(r["sizes"]["falls"], {"high": 0.05}, model_name="gpt2-nano", tokens=TWICE // 2),
    ],
    "size_does_not_explain_the_real_model": [
        row_in("real_model", {"median": 0.1}, repair="zero", loss_rate=0.03),
        lambda r: set_in(r["sizes"]["rises"], {"rise": 0.1}, model_name="gpt2-micro", whole_packets=True),
    ],
    "hadamard_helps_the_small_model": [
        arm_of("06_repair_again", {"gain_p_holm": 0.06}, task=SST2, arm="hadamard(64)"),
        arm_of("06_repair_again", {"gain": -0.01}, task=SST2, arm="hadamard(64)"),
    ],
    "hadamard_does_not_help_the_real_model": [
        row_in("real_model", {"median": 0.1}, repair="hadamard(64)", loss_rate=0.1),
        row_in("real_model", {"high": 0.06}, repair="hadamard(64)", loss_rate=0.03),
    ],
    "protection_ends_the_collapse": [
        row_in("real_model", {"collapsed": 0.01}, repair="protect(0.01)", loss_rate=0.1),
        row_in("real_model", {"collapsed": 0.0}, repair="zero", loss_rate=0.03, losses="single", algorithm="direct"),
        row_in("real_model", {"rise": 3.0}, repair=FEW, loss_rate=0.1, losses="single"),
    ],
    "protection_holds_on_other_losses": [
        row_in("real_model", {"collapsed": 0.01}, repair=FEW, losses="bursts of 8"),
        row_in("real_model", {"collapsed": 0.0}, repair="zero", losses="bursts of 8"),
        row_in("real_model", {"high": 2.0}, repair=FEW, losses="correlated(shared=1.0)"),
        row_in("real_model", {"rise": 2.0}, repair=FEW, losses="trace('traces/congestion.parquet')"),
        row_in("real_model", {"high": 0.1}, repair=FEW, losses="trace('traces/congestion.parquet')"),
        lambda r: r.update(real_model=[row for row in r["real_model"] if row["losses"] != "bursts of 8"]),
    ],
    "both_phases_stay_costly": [
        row_in("real_model", {"collapsed": 0.9}, repair="zero", phase="both", algorithm="direct", loss_rate=0.1),
        row_in("real_model", {"smallest": 0.5}, repair=FEW, phase="both"),
        row_in("real_model", {"high": 5.0}, repair=FEW, phase="both"),
        row_in("real_model", {"largest": 5.0}, repair=FEW, phase="both"),
    ],
    "advised_repair_holds_on_other_losses": [
        row_in("real_model", {"collapsed": 0.01}, repair=ADVISED, losses="bursts of 8"),
        row_in("real_model", {"high": 9.0}, repair=ADVISED, phase="both"),
        row_in("real_model", {"high": 0.7}, repair=ADVISED, losses="correlated(shared=1.0)"),
        row_in("real_model", {"losses": "single"}, repair=ADVISED, losses="bursts of 8"),
        lambda r: r.update(real_model=[row for row in r["real_model"] if row["algorithm"] != "switch"]),
        row_in("real_model", {"repair": "another"}, repair="zero", algorithm="ring", phase="reduce", loss_rate=0.1),
        row_in("real_model", {"low": 0.09}, repair=ADVISED, phase="both"),
    ],
    "one_retransmission_is_a_lower_rate": [
        row_in("real_model", {"low": 0.09}, repair="retransmit(1)"),
        row_in("real_model", {"high": 0.06}, repair="retransmit(1)"),
        row_in("real_model", {"collapsed": 0.01}, repair="retransmit(1)"),
    ],
    "protection_keeps_accuracy_at_three_per_cent": [
        arm_of("13_real_model_rates", {"high": 0.001}, arm="zero, 3%"),
        arm_of("13_real_model_rates", {"low": -0.03}, arm="protect(0.1) + hadamard(64), 3%"),
        row_in("real_gains_by_rate", {"low": -0.001}, loss_rate=0.03),
        row_in("real_gains_by_rate", {"low": -0.001}, loss_rate=0.1),
        row_in("real_gains_by_rate", {"low": 0.001}, loss_rate=0.01),
        row_in("real_gains_by_rate", {"seeds": 3}, loss_rate=0.1),
        arm_of("13_real_model_advised", {"gain_p_holm": 0.06}, arm="protect(0.1) + hadamard(64)"),
        row_in("real_gains_by_rate", {"loss_rate": 0.2}, loss_rate=0.1),
    ],
    "low_rates_stay_uncertain_in_the_real_model": [
        arm_of("13_real_model_rates", {"p_holm": 0.01}, arm="zero, 1%"),
        arm_of("13_real_model_rates", {"p_holm": 0.01}, arm="protect(0.1) + hadamard(64), 1%"),
        arm_of("13_real_model_rates", {"p_holm": 0.01}, arm="zero, 3%"),
        arm_of("13_real_model_rates", {"high": -0.001}, arm="zero, 1%"),
        arm_of("13_real_model_rates", {"p_holm": 0.01}, arm="protect(0.1) + hadamard(64), 3%"),
        arm_of("13_real_model_rates", {"high": -0.001}, arm="protect(0.1) + hadamard(64), 1%"),
    ],
    "rare_collapses_add_to_the_mean": [
        row_in("real_model", {"collapsed": 0.01}, repair="zero", phase="reduce", algorithm="direct", loss_rate=0.01),
        lambda r: r["strongest_packet"].update(rise=7.0),
        lambda r: r["strongest_packet"].update(rise=13.0),
        row_in("real_model", {"high": 0.11}, repair="zero", phase="reduce", algorithm="direct", loss_rate=0.01),
        row_in("real_model", {"low": -0.02}, repair="zero", phase="reduce", algorithm="direct", loss_rate=0.01),
        row_in("real_model", {"rise": 4.0}, repair="zero", losses="single", algorithm="direct", loss_rate=0.1),
        row_in("real_model", {"collapsed": 0.0}, repair="zero", losses="single", algorithm="direct", loss_rate=0.1),
        row_in("real_model", {"rise": 0.9}, repair="zero", losses="single", algorithm="direct", loss_rate=0.1),
    ],
    "return_sums_reliably": [
        row_in("real_model", {"low": 0.05}, repair="zero", phase="both", algorithm="direct", loss_rate=0.01),
        row_in("real_model", {"median": 0.1}, repair="zero", phase="both", algorithm="direct", loss_rate=0.01),
    ],
    "protection_and_retransmission_repair_most": [
        row_in("real_model", {"high": 0.21}, repair="protect(0.1) + retransmit(1)"),
        row_in("real_model", {"collapsed": 0.01}, repair="protect(0.1) + retransmit(1)"),
        row_in("real_model", {"low": 0.05}, repair="protect(0.1) + hadamard(64)", loss_rate=0.1),
        row_in("real_model", {"packets": 1e9}, repair="protect(0.1) + hadamard(64)", loss_rate=0.1),
        row_in("real_model", {"high": 0.01}, repair="retransmit(1)"),
        lambda r: r["real_training_round_trips"]["qnli"].update({"protect(0.1) + retransmit(1)": 2.5}),
        lambda r: r["real_training_round_trips"]["sst2"].update({"retransmit(1)": 1.6}),
    ],
    "random_protection_is_not_enough": [
        row_in("real_model", {"collapsed": 0.0}, repair="protect(0.01, 'random')", loss_rate=0.1),
        row_in("real_model", {"low": 0.5}, repair="protect(0.01, 'random')", loss_rate=0.1),
    ],
    "single_packets_destroy_blocks": [
        lambda r: r["strongest_packet"].update(least_rise=2.9),
        lambda r: r["strongest_packet"].update(usual_rise=0.2),
    ],
    "forward_losses_hurt": [
        arm_of("04_where", {"p_holm": 0.04}, task=SST2, arm="backward only"),
        arm_of("04_where", {"difference": -0.5}, task=SST2, arm="backward only"),
    ],
    "gather_phase_costs_more": [
        arm_of("04_where", {"gain_p_holm": 0.06}, task=SST2, arm="gather phase only"),
        arm_of("04_where", {"gain": 0.01}, task=SST2, arm="gather phase only"),
    ],
    "first_layer_costs_most": [arm_of("04_where", {"difference": -0.05}, task="docstrings", arm="layers 2:3 only")],
    "evaluation_alone_costs_less": [
        row_in("sensitivity", {"mean_low": -0.07}, task="docstrings", trained_at=0.0, evaluated_at=0.3)
    ],
    "shared_losses_cost_more": [arm_of("02_shared", {"gain_high": 0.001}, task=SST2, arm="losses all shared")],
    "stale_harms": [
        arm_of("06_repair", {"gain_p_holm": 0.06}, task=SST2, arm="stale"),
        arm_of("06_repair", {"gain": 0.01}, task=SST2, arm="stale"),
    ],
    "pipelines_collapse": [
        arm_of("07_parallelisms", {"high": -0.009}, task=SST2, arm="pp 2, zero", loss_rate=0.01),
        arm_of("07_parallelisms", {"low": -0.5}, task=SST2, arm="pp 2 exact adjoint, zero", loss_rate=0.01),
    ],
    "data_parallelism_bears_more": [
        row_in("parallelisms", {"p_holm": 0.06}, task="docstrings", arm="ddp 2", repair="zero", loss_rate=0.1),
        row_in("parallelisms", {"difference": -0.1}, task="docstrings", arm="ddp 2", repair="zero", loss_rate=0.1),
        arm_of("07_parallelisms", {"lost_a_step": 900.0}, task="docstrings", arm="ddp 2, zero", loss_rate=0.1),
    ],
    "training_with_loss_does_not_pay": [
        row_in("robustness", {"difference": 0.02, "p_holm": 0.01}, task=SST2, trained_at=0.3, evaluated_at=0.3),
        row_in("sensitivity", {"difference": -0.1}, task="docstrings", trained_at=0.3, evaluated_at=0.3),
        row_in("sensitivity", {"p_holm": 0.06}, task="docstrings", trained_at=0.3, evaluated_at=0.3),
    ],
    "sharded_data_parallelism_bears_less": [
        row_in("parallelisms", {"p_holm": 0.06}, task=SST2, arm="fsdp 2", repair="zero", loss_rate=0.1),
        row_in("parallelisms", {"difference": 0.1}, task=SST2, arm="fsdp 2", repair="zero", loss_rate=0.1),
    ],
    "bias_before_the_sum_costs_more": [
        arm_of("07_implementations", {"gain_p_holm": 0.06}, arm="dtensor"),
        arm_of("07_implementations", {"gain": 0.01}, arm="dtensor"),
        arm_of("07_implementations", {"lost_a_step": 1.0}, arm="dtensor"),
    ],
    "rescaling_harms_both_phases": [
        arm_of("06_repair_of_both_phases", {"gain_p_holm": 0.06}, task=SST2, arm="rescale"),
        arm_of("06_repair_of_both_phases", {"gain": 0.01}, task=SST2, arm="rescale"),
        arm_of("06_repair", {"gain": 0.01, "gain_p_holm": 0.01}, task=SST2, arm="rescale"),
    ],
    "arms_scatter_as_seeds_do": [
        lambda r: r["law"]["docstrings"].update(chi_squared=2.1),
        lambda r: r["law"][SST2].update(chi_squared=None),
    ],
    "retransmission_is_cheap": [
        row_in(
            "price", {"price": 2.1}, transport="selective repeat", loss_rate=0.1, bandwidth_gbits=1, round_trip_us=10
        )
    ],
}
