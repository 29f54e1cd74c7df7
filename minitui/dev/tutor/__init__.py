"""The training data of the bundled model, and the programs that train and evaluate the model."""
