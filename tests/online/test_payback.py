"""What tuning cost and gave, in words."""

from lagom_overlap.online.payback import Payback
from lagom_overlap.online.ranks.messages import Report, SwitchState, WindowPlan
from lagom_overlap.tuners.verdict import judge


def test_the_sentence_says_what_a_step_saves_and_after_how_many_steps_that_pays() -> None:
    payback = Payback()
    payback.arm(Report(rank=0, num_steps=0), 0.1)
    payback.took(
        WindowPlan(window=0, state=SwitchState.SEARCH, reason="", num_steps=10), Report(rank=0, num_steps=10), 1.0
    )
    payback.took(
        WindowPlan(window=1, state=SwitchState.SEARCH, reason="", num_steps=10),
        Report(rank=0, num_steps=20, stepped_s=3.0),
        3.0,
    )
    verdict = judge({"default": (0.1,) * 4, "tuned": (0.08,) * 4}, tuned_differs=True, failures={})
    words = payback.sentence(verdict)
    assert words.startswith(
        "new settings save 20.0 ms a step: proven faster in 4 pairs: 1.250x (1.250 to 1.250; error rate 1 %); "
    )
    assert words.endswith("tuning took 20 steps and cost 1.00 s, paid back after 50 steps")
    payback.has_one_clock = False  # an emulated job, whose steps are virtual and whose tuning is not
    assert payback.sentence(verdict).endswith("error rate 1 %); tuning took 20 steps")
    stays = judge({"default": (0.1,) * 4, "tuned": (0.1,) * 4}, tuned_differs=True, failures={})
    assert payback.sentence(stays).startswith("nothing was changed: the best settings found are no faster: 1.0000x")
    assert "save" not in payback.sentence(stays)
    assert payback.sentence(None).startswith("nothing was changed: no settings tried were faster than the default; ")
    assert payback.sentence(None, why_none="no setting was tried").startswith(
        "nothing was changed: no setting was tried; "
    )
