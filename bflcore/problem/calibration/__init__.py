"""Calibration after training: temperatures, prediction sets, and thresholds for strange samples."""

from bflcore.problem.calibration.conformal import Conformal
from bflcore.problem.calibration.outliers import Outliers
from bflcore.problem.calibration.temperature import Temperature

__all__ = ["CALIBRATORS"]

# What calibrates if samples are held out for it, and nothing else is chosen.
CALIBRATORS = (Temperature, Conformal, Outliers)
