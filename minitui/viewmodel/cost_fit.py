"""Fits costs to times: least squares with costs that are not negative, in which outliers count little (Huber 1964)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 6  # number of times that the errors are weighted again
ALIKE = 1e-9  # the same for features that grow together so closely that nothing tells one from the other
SINGULAR = 1e-12  # smaller singular values of the products of features, relative to the largest, are zero


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs, and how certain these are.

    costs        [features], in ms
    covariance   [features, features] of the costs
    own          [n] the share of each fitted time in the time that the fit gives for the same work (its leverage)
    """

    costs: np.ndarray
    covariance: np.ndarray
    own: np.ndarray

    def of(self, work: np.ndarray) -> np.ndarray:
        """Returns the time [n] that work [n, features] costs."""
        return work @ self.costs

    def error(self, work: np.ndarray) -> np.ndarray:
        """Returns the standard error [n] of the time that work [n, features] costs."""
        return np.sqrt(np.maximum(((work @ self.covariance) * work).sum(axis=1), 0.0))


def robust(work: np.ndarray, took: np.ndarray) -> Fit:
    """Returns the costs of work [n, features] that took these times [n], by iteratively reweighted least squares."""
    scale = np.maximum(work.max(axis=0), 1.0)
    scaled = work / scale
    # Minimise relative errors: a prefill of 60 ms may deviate more than a decode step of 3 ms.
    weights = base = 1.0 / np.maximum(took, max(float(np.median(took)), 1e-6))
    cost = np.zeros(work.shape[1])
    for _ in range(ROUNDS):
        used = weights
        cost = _non_negative(scaled * weights[:, None], took * weights)
        errors = np.abs(took - scaled @ cost)
        limit = 1.5 * max(1.4826 * float(np.median(errors)), 1e-6)
        weights = base * np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    weighted = scaled * used[:, None]
    free = int(work.any(axis=0).sum())
    variance = float(np.sum((errors * used) ** 2)) / max(1, len(took) - free)
    # All features count, also those that cost nothing: between features that grow together, the fit may have chosen.
    inverse = np.linalg.pinv(weighted.T @ weighted, rcond=SINGULAR, hermitian=True)
    own = ((weighted @ inverse) * weighted).sum(axis=1)
    return Fit(cost / scale, variance * inverse / np.outer(scale, scale), own)


def unseen(work: np.ndarray) -> np.ndarray:
    """Returns the directions [features, k] in which no work [n, features] lies: its times tell no cost of these."""
    scale = np.maximum(work.max(axis=0), 1.0)
    values, vectors = np.linalg.eigh((work / scale).T @ (work / scale))
    return vectors[:, values <= ALIKE * max(1.0, values[-1])] / scale[:, None]


def _non_negative(work: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns least-squares coefficients, none negative: drops the lowest and solves again while any is negative.

    Solves the normal equations: with a thousand steps and seven features, this takes a tenth of the time.
    """
    active = np.flatnonzero(work.any(axis=0))
    products, sums = work.T @ work, work.T @ took
    cost = np.zeros(work.shape[1])
    while len(active):
        solved = np.linalg.lstsq(products[np.ix_(active, active)], sums[active], rcond=SINGULAR)[0]
        if (solved >= 0).all():
            cost[active] = solved
            break
        active = np.delete(active, int(np.argmin(solved)))
    return cost
