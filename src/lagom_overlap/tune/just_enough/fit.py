"""Maximum a posteriori fits by damped Gauss-Newton steps, several starts at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lagom_overlap.tune.just_enough.lattice import Floats
from lagom_overlap.tune.just_enough.wire import Prior

Predict = Callable[[Floats], Floats]
"""From (S, Q, P) parameters to (S, Q, D) predicted logarithms."""

STEP = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """Best parameters (S, P), their covariances (S, P, P) and costs (S,), half a sum of squares, prior included."""

    params: Floats
    covariance: Floats
    cost: Floats


def fit(predict: Predict, observed: Floats, *, sd: Floats, prior: Prior, start: Floats, num_steps: int = 8) -> Fit:
    """The fits from starts (S, P) to D observed logarithms of standard deviations `sd`."""
    num_starts, num_params = start.shape
    params, damping = start.copy(), np.full(num_starts, 1e-3)
    shifts = np.concatenate([np.zeros((1, num_params)), STEP * np.eye(num_params)])
    values = predict(params[:, None, :] + shifts)
    cost = _cost(values[:, 0], params, observed, sd, prior)
    for _ in range(num_steps):
        jacobian = np.swapaxes((values[:, 1:] - values[:, :1]) / STEP, 1, 2) / sd[:, None]
        error = (values[:, 0] - observed) / sd
        normal = np.swapaxes(jacobian, 1, 2) @ jacobian + np.diag(prior.sd**-2)
        slope = np.einsum("sdp,sd->sp", jacobian, error) + (params - prior.mean) / prior.sd**2
        ridge = damping[:, None, None] * (np.eye(num_params) * np.einsum("spp->sp", normal)[:, None, :])
        step = np.linalg.solve(normal + ridge, -slope[..., None])[..., 0]
        tried = params + np.clip(step, -2 * prior.sd, 2 * prior.sd)
        tried_values = predict(tried[:, None, :] + shifts)
        tried_cost = _cost(tried_values[:, 0], tried, observed, sd, prior)
        better = tried_cost < cost
        gain = np.max((cost - tried_cost) / (cost + 1e-9), where=better, initial=0.0)
        params = np.where(better[:, None], tried, params)
        values = np.where(better[:, None, None], tried_values, values)
        cost = np.where(better, tried_cost, cost)
        damping = np.where(better, damping / 5, damping * 10)
        if better.all() and gain < 1e-3:
            break
    jacobian = np.swapaxes((values[:, 1:] - values[:, :1]) / STEP, 1, 2) / sd[:, None]
    normal = np.swapaxes(jacobian, 1, 2) @ jacobian + np.diag(prior.sd**-2)
    return Fit(params=params, covariance=np.asarray(np.linalg.inv(normal), dtype=np.float64), cost=cost)


def _cost(values: Floats, params: Floats, observed: Floats, sd: Floats, prior: Prior) -> Floats:
    error, away = (values - observed) / sd, (params - prior.mean) / prior.sd
    cost = 0.5 * (np.sum(error**2, axis=-1) + np.sum(away**2, axis=-1))
    return np.where(np.isfinite(cost), cost, 1e30)
