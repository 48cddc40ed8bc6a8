"The data cards of foco; installed as the package foco.data_cards, so that importlib.resources finds them."
