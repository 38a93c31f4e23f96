"""Learning-rate schedules: linear warm-up, then constant, linear, cosine or stable-then-decay, as one pure function."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfdist.config import ScheduleConfig


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate at an update, float32 [].

    With p the peak, w the warm-up steps, d the step at which the decay ends and m the floor as a part of the peak:
      warm-up  (step < w):   p * (step + 1) / w, so that the first update is not lost
      progress               t = clip((step - start) / (d - start), 0, 1), start = w (wsd: d - decay_fraction * d)
      constant: p   linear, wsd: p * (1 - (1 - m) t)   cosine: p * (m + (1 - m) (1 + cos(pi t)) / 2)
    Cosine: Loshchilov & Hutter 2017, arXiv:1608.03983. Warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395.
    """

    def __init__(
        self, shape: str, peak: float, warmup_steps: int, decay_steps: int, decay_fraction: float, floor: float
    ):
        super().__init__()
        self.shape, self.peak, self.floor = shape, peak, floor
        self.warmup_steps, self.decay_steps, self.decay_fraction = warmup_steps, decay_steps, decay_fraction

    @classmethod
    def create(cls, config: ScheduleConfig, total_steps: int) -> Schedule:
        """Makes the schedule that the flags describe. total_steps: the length of the run, at which the decay ends
        unless --decay_steps is given."""
        return cls(
            config.schedule,
            config.learning_rate,
            config.warmup_steps,
            config.decay_steps or total_steps,
            config.decay_fraction,
            config.min_learning_rate_ratio,
        )

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        step = tf.cast(step, tf.float32)
        start = self.warmup_steps
        if self.shape == "wsd":
            start = max(start, round(self.decay_steps * (1 - self.decay_fraction)))
        progress = tf.clip_by_value((step - start) / max(self.decay_steps - start, 1), 0.0, 1.0)
        after = {
            "constant": tf.ones_like(progress),
            "linear": 1 - (1 - self.floor) * progress,
            "wsd": 1 - (1 - self.floor) * progress,
            "cosine": self.floor + (1 - self.floor) * (1 + tf.cos(math.pi * progress)) / 2,
        }[self.shape]
        warmup = (step + 1) / max(self.warmup_steps, 1)
        return self.peak * tf.where(step < self.warmup_steps, warmup, after)

    def get_config(self) -> dict:
        return {
            "shape": self.shape,
            "peak": self.peak,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            "decay_fraction": self.decay_fraction,
            "floor": self.floor,
        }
