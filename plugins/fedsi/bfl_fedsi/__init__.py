"""FedSI: federated learning with subnetwork inference (Chen, Liu, Wu, Fan & Cao 2024)."""
