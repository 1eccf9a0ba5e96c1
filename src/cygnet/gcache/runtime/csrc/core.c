/* cygnet.gcache.runtime._core: the loops of GCache that move every byte, compiled. Optional: compiled.py says how it is
 * chosen, and everything works without it. */
#include "core.h"

Hashing hashing;

static PyObject *use_xxh3(PyObject *module, PyObject *args) {
    unsigned long long at[6];
    if (!PyArg_ParseTuple(args, "KKKKKK", &at[0], &at[1], &at[2], &at[3], &at[4], &at[5])) return NULL;
    for (int i = 0; i < 6; i++)
        if (at[i] == 0) {
            PyErr_SetString(PyExc_ValueError, "a function at address 0");
            return NULL;
        }
    hashing.whole = (uint64_t (*)(const void *, size_t, uint64_t))(uintptr_t)at[0];
    hashing.create = (void *(*)(void))(uintptr_t)at[1];
    hashing.destroy = (int (*)(void *))(uintptr_t)at[2];
    hashing.reset = (int (*)(void *, uint64_t))(uintptr_t)at[3];
    hashing.update = (int (*)(void *, const void *, size_t))(uintptr_t)at[4];
    hashing.digest = (uint64_t (*)(const void *))(uintptr_t)at[5];
    Py_RETURN_NONE;
}

static PyObject *xxh3(PyObject *module, PyObject *args) {
    Py_buffer data;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y*K", &data, &seed)) return NULL;
    uint64_t digest = hashing.whole == NULL ? 0 : hashing.whole(data.buf, (size_t)data.len, seed);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(digest);
}

static PyMethodDef own_methods[] = {
    {"use_xxh3", use_xxh3, METH_VARARGS, "Addresses of xxh3's functions; before anything else."},
    {"xxh3", xxh3, METH_VARARGS, "xxh3_64, to compare with the package's."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", NULL, -1, own_methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) {
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "the compiled core is for little-endian machines");
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddFunctions(module, io_methods) < 0 ||
        PyModule_AddFunctions(module, batch_methods) < 0 || PyModule_AddType(module, &TableType) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", CORE_VERSION) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
