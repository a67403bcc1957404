"""What tuning cost and gave, in words."""

from lagom_overlap.runtime.messages import Plan, Report, State
from lagom_overlap.runtime.payback import Payback
from lagom_overlap.tune.verdict import judge


def test_the_sentence_says_what_a_step_saves_and_after_how_many_steps_that_pays() -> None:
    payback = Payback()
    payback.arm(Report(rank=0, num_steps=0), 0.1)
    payback.took(Plan(window=0, state=State.SEARCH, reason="", num_steps=10), Report(rank=0, num_steps=10), 1.0)
    payback.took(
        Plan(window=1, state=State.SEARCH, reason="", num_steps=10), Report(rank=0, num_steps=20, stepped_s=3.0), 3.0
    )
    verdict = judge({"default": (0.1,) * 4, "tuned": (0.08,) * 4}, tuned_differs=True, failures={})
    words = payback.sentence(verdict)
    assert words.startswith("tuned (default over tuned 1.250 [1.250, 1.250] in 4 pairs), saves 20.0 ms a step; ")
    assert words.endswith("tuning took 20 steps and cost 1.00 s, paid back after 50 steps")
    stays = judge({"default": (0.1,) * 4, "tuned": (0.1,) * 4}, tuned_differs=True, failures={})
    assert payback.sentence(stays).startswith("the default stays (")
    assert "saves" not in payback.sentence(stays)
