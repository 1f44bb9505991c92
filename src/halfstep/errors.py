"""Every error that halfstep raises on purpose.

::

    HalfstepError
    ├── UsageError (ValueError)          what was given cannot be run: one sentence, exit code 2
    │   ├── ConfigError                  a key or value of the configuration
    │   ├── DataError                    a file, loader or batch
    │   ├── ModelError                   a model, loss or optimizer
    │   ├── DeviceError                  something this device cannot do
    │   ├── CheckpointError              a checkpoint that is damaged, foreign, or of another model
    │   └── SourceError                  a source file that cannot be read
    └── RunStopped (RuntimeError)        a run that was going and was ended for a reason: exit code 1
        ├── ScaleFloorReached            the loss scale fell below its floor
        └── TooManySkips                 too many updates in a row had gradients that were not finite
"""


class HalfstepError(Exception):
    """The root of all errors raised on purpose by halfstep."""


class UsageError(HalfstepError, ValueError):
    """What was given cannot be run. The message says what was given, what is wrong and what would be right."""


class ConfigError(UsageError):
    """A key or a value of the configuration is wrong."""


class DataError(UsageError):
    """A data file, a loader or a batch is wrong."""


class ModelError(UsageError):
    """A model, a loss function or an optimizer cannot be trained as asked."""


class DeviceError(UsageError):
    """The device cannot do what was asked."""


class CheckpointError(UsageError):
    """A checkpoint cannot be loaded: it is damaged, foreign, newer than this halfstep, or of another model."""


class SourceError(UsageError):
    """A source file cannot be read."""


class RunStopped(HalfstepError, RuntimeError):
    """A run that was under way was ended; the message says why and what to do."""


class ScaleFloorReached(RunStopped):
    """The loss scale fell below its floor: no scale makes the gradients finite."""


class TooManySkips(RunStopped):
    """Too many updates in a row were skipped because their gradients were not finite."""
