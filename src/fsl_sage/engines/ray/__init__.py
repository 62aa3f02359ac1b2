"""The same runs on Ray actors: many cores, GPUs and machines, and the same numbers."""

from fsl_sage.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]
