"""The ClientApp, which fedsift makes from the model, the data and the algorithm."""

from fedsift.flower import client_app
from quickstart.algorithm import make_algorithm
from quickstart.dataset import load_share
from quickstart.model import make_model

app = client_app(make_model, load_share, make_algorithm)
