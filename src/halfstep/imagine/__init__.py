"""imagine"""
