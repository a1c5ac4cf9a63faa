"""Episodes: several turns of a policy with tools or an environment, trained on as one sample."""
