"""What a chapter needs: claims, presets, progress, sweeps, explorables, figures, source."""
