"""Using what a run has trained.

trained     the model of a run, with what it needs besides its weights
pictures    image files as a model sees them
predict     the classes of image files
evaluate    the metrics of a run's model on a test set
"""

from fsl_sage.inference.evaluate import evaluate
from fsl_sage.inference.predict import Prediction, predict
from fsl_sage.inference.trained import Trained, load_model, load_trained

__all__ = ["Prediction", "Trained", "evaluate", "load_model", "load_trained", "predict"]
