"""Weighted shares: core's fair scheduler, with more for some users than for others."""

from __future__ import annotations

from pydantic import Field

from infer import hookimpl
from infer.contracts.request import Owner
from infer.contracts.scheduler import SchedulerContext, SchedulerRegistration
from infer.contracts.sections import Section
from infer.engine.schedulers import FairScheduler

INFER_PLUGIN_API = 2


class WeightedSettings(Section):
    users: list[str] = Field([], description="Users who get a larger share, separated by commas.")
    weight: float = Field(2.0, gt=0, allow_inf_nan=False, description="How many times as much as others they get.")


class WeightedScheduler(FairScheduler):
    def __init__(self, context: SchedulerContext, settings: WeightedSettings) -> None:
        super().__init__(context.pool, context.engine)
        self._weights = dict.fromkeys(settings.users, settings.weight)

    def weight(self, owner: Owner) -> float:
        """It divides what is counted for the user and for the key: a key whose users weigh more gets more, too."""
        return self._weights.get(owner.user, 1.0)


@hookimpl
def infer_schedulers() -> list[SchedulerRegistration]:
    what = "fair shares, and more of them for the users in engine.weighted.users"
    return [SchedulerRegistration("weighted", WeightedScheduler, what, WeightedSettings)]
