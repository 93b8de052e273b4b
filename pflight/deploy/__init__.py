"""Real federations: the run that was simulated, on Flower, with clients on other machines."""
