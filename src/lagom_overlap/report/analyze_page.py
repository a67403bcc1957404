"""x"""
def render_analysis(report): return ""
