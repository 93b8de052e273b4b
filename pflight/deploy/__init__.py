"""Real federations: a simulated run becomes a run on Flower with clients on other machines."""
