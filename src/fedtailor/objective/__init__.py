"""Losses and metrics: tasks by name, what a user may replace, and what the methods add."""

from fedtailor.objective.losses import Loss, cross_entropy, distillation_loss
from fedtailor.objective.metrics import Metric, accuracy
from fedtailor.objective.objective import Objective, ObjectiveSettings
from fedtailor.objective.tasks import OWN, TASKS, LearningTask

__all__ = [
    "OWN",
    "TASKS",
    "LearningTask",
    "Loss",
    "Metric",
    "Objective",
    "ObjectiveSettings",
    "accuracy",
    "cross_entropy",
    "distillation_loss",
]
