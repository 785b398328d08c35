"""Gilbert-Elliott processes of many kinds."""

from lossytp.network.losses import GilbertElliott

KEY = (0, "test")


def simple(loss_rate, mean_burst_packets):
    return GilbertElliott.from_loss_and_burst(loss_rate=loss_rate, mean_burst_packets=mean_burst_packets)


def general(p_good_to_bad, p_bad_to_good, loss_bad, loss_good):
    return GilbertElliott(
        p_good_to_bad=p_good_to_bad, p_bad_to_good=p_bad_to_good, loss_bad=loss_bad, loss_good=loss_good
    )


PROCESSES = {
    "burst 1": simple(0.05, 1),
    "burst 8": simple(0.01, 8),
    "burst 100": simple(0.1, 100),
    "most are lost": simple(0.8, 8),
    "both states lose": general(0.01, 0.1, loss_bad=0.7, loss_good=0.02),
    "bad state loses some": general(0.005, 0.3, loss_bad=0.65, loss_good=0),
    "good state loses more": general(0.2, 0.05, loss_bad=0.4, loss_good=0.9),
    "states take turns": general(0.9, 0.8, loss_bad=0.95, loss_good=0.05),
    "states lose alike": general(0.1, 0.1, loss_bad=0.1, loss_good=0.1),
}
