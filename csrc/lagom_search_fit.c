/* Damped Gauss-Newton steps to the maximum a posteriori. */
#include "lagom_search.h"

static const double LEAST_GAIN = 1e-3, AWFUL = 1e30;

void factorise(double *a, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
        double *row = a + k * n;
        for (int64_t j = 0; j < k; j++) {
            const double *other = a + j * n;
            double sum = row[j];
            for (int64_t i = 0; i < j; i++) sum -= row[i] * other[i];
            row[j] = sum / other[j];
        }
        double pivot = row[k];
        for (int64_t i = 0; i < k; i++) pivot -= row[i] * row[i];
        row[k] = sqrt(larger(pivot, 1e-300));
    }
}

void solve(const double *factor, int64_t n, double *x) {
    for (int64_t k = 0; k < n; k++) {
        for (int64_t i = 0; i < k; i++) x[k] -= factor[k * n + i] * x[i];
        x[k] /= factor[k * n + k];
    }
    for (int64_t k = n - 1; k >= 0; k--) {
        x[k] /= factor[k * n + k];
        for (int64_t i = 0; i < k; i++) x[i] -= factor[k * n + i] * x[k];
    }
}

static double cost_of(const struct problem *p, const double *params, const double *values) {
    double cost = 0.0;
    for (int64_t i = 0; i < p->num_rows; i++) {
        double error = (values[i] - p->observed[i]) / p->sd[i];
        cost += error * error;
    }
    for (int64_t i = 0; i < p->num_params; i++) {
        double away = (params[i] - p->mean[i]) / p->prior_sd[i];
        cost += away * away;
    }
    return isfinite(cost) ? 0.5 * cost : AWFUL;
}

/* H = J^T J + prior, slope = J^T error + prior. */
static void normal_equations(const struct problem *p, const double *params, const double *values,
                             const double *jacobian, double *normal, double *slope) {
    int64_t n = p->num_params;
    memset(normal, 0, (size_t)(n * n) * sizeof *normal);
    for (int64_t a = 0; a < n; a++) {
        double precision = 1 / (p->prior_sd[a] * p->prior_sd[a]);
        normal[a * n + a] = precision;
        slope[a] = (params[a] - p->mean[a]) * precision;
    }
    for (int64_t i = 0; i < p->num_rows; i++) {
        const double *row = jacobian + i * n;
        double weight = 1 / (p->sd[i] * p->sd[i]), error = values[i] - p->observed[i];
        for (int64_t a = 0; a < n; a++) {
            double weighted = row[a] * weight;
            if (weighted == 0) continue;
            slope[a] += weighted * error;
            for (int64_t b = 0; b <= a; b++) normal[a * n + b] += weighted * row[b];
        }
    }
}

/* From `params`, in place; the covariance (params, params) and the cost at the end. */
void fit(const struct problem *p, int64_t num_steps, double *params, double *covariance, double *cost, double *scratch) {
    int64_t n = p->num_params, rows = p->num_rows;
    double *values = scratch, *tried_values = values + rows, *jacobian = tried_values + rows;
    double *normal = jacobian + rows * n, *ridged = normal + n * n, *slope = ridged + n * n, *step = slope + n;
    double *tried = step + n, damping = 1e-3;
    p->predict(p->model, params, values, jacobian);
    *cost = cost_of(p, params, values);
    normal_equations(p, params, values, jacobian, normal, slope);
    for (int64_t round = 0; round < num_steps; round++) {
        memcpy(ridged, normal, (size_t)(n * n) * sizeof *normal);
        for (int64_t a = 0; a < n; a++) ridged[a * n + a] *= 1 + damping;
        factorise(ridged, n);
        for (int64_t a = 0; a < n; a++) step[a] = -slope[a];
        solve(ridged, n, step);
        for (int64_t a = 0; a < n; a++) {
            double most = 2 * p->prior_sd[a];
            tried[a] = params[a] + smaller(larger(step[a], -most), most);
        }
        p->predict(p->model, tried, tried_values, NULL);
        double tried_cost = cost_of(p, tried, tried_values);
        double gain = (*cost - tried_cost) / (*cost + 1e-9);
        if (tried_cost < *cost) {
            memcpy(params, tried, (size_t)n * sizeof *params);
            p->predict(p->model, params, values, jacobian);
            *cost = tried_cost;
            normal_equations(p, params, values, jacobian, normal, slope);
            damping /= 5;
        } else {
            damping *= 10;
        }
        if (fabs(gain) < LEAST_GAIN) break;
    }
    factorise(normal, n);
    for (int64_t a = 0; a < n; a++) {
        memset(step, 0, (size_t)n * sizeof *step);
        step[a] = 1;
        solve(normal, n, step);
        for (int64_t b = 0; b < n; b++) covariance[b * n + a] = step[b];
    }
}

/* Room for the scratch of a fit. */
double *fit_scratch(int64_t rows, int64_t n) {
    return malloc((size_t)(rows * (n + 2) + 2 * n * n + 3 * n) * sizeof(double));
}
