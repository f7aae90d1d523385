#!/bin/sh
# Make, or renew, the certificate of one member of a cluster, and before the first one the authority that signs them:
#   certificates.sh FOLDER NAME [OTHER-NAME|ADDRESS ...]
# FOLDER gets ca.pem, ca.key, NAME.pem and NAME.key; only ca.pem and the two of NAME belong on NAME's machine. ca.key stays here,
# as private as a password. A certificate is renewed when a third of its time is left, when its names change, or when the authority
# has. What was made is printed, a line each; nothing is printed where all is in order.
# DAYS: how long a certificate is valid (825). CA_DAYS: the authority itself (3650).
set -eu
umask 077
folder=$1 name=$2
shift 2
days=${DAYS:-825}
case $name in
*[!A-Za-z0-9._-]* | "" | .* | ca) echo "certificates.sh: $name can't be a member's name: letters, digits, '.', '_' and '-'" >&2 && exit 2 ;;
esac
mkdir -p "$folder"
cd "$folder"
work=$(mktemp -d ./.new.XXXXXX)
trap 'rm -rf "$work"' EXIT

cat >"$work/ca.conf" <<CONF
[req]
distinguished_name = name
prompt = no
x509_extensions = authority
[name]
CN = llama-gateway cluster
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
CONF
if [ ! -f ca.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days "${CA_DAYS:-3650}" \
        -config "$work/ca.conf" -keyout "$work/ca.key" -out "$work/ca.pem" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
    mv "$work/ca.pem" ca.pem
    mv "$work/ca.key" ca.key
    echo ca.pem
fi

names="DNS:$name"
for other in "$@"; do
    case $other in
    *:*) names="$names,IP:$other" ;;
    *[!0-9.]*) names="$names,DNS:$other" ;;
    *) names="$names,IP:$other" ;;
    esac
done
# What it is made of is kept in its file, before the certificate, where programs skip it.
if [ -f "$name.key" ] && [ "$(head -n 1 "$name.pem" 2>/dev/null)" = "$names" ] &&
    openssl x509 -in "$name.pem" -noout -checkend $((days * 86400 / 3)) >/dev/null &&
    openssl verify -CAfile ca.pem "$name.pem" >/dev/null 2>&1; then
    exit 0
fi
cat >"$work/member.conf" <<CONF
[req]
distinguished_name = name
prompt = no
[name]
CN = $name
[member]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = $names
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
CONF
{
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -config "$work/member.conf" \
        -keyout "$work/key" -out "$work/request"
    openssl x509 -req -in "$work/request" -CA ca.pem -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" -days "$days" \
        -sha256 -extfile "$work/member.conf" -extensions member -out "$work/certificate"
} 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
{ echo "$names"; cat "$work/certificate"; } >"$work/pem"
mv "$work/key" "$name.key"
mv "$work/pem" "$name.pem"
echo "$name.pem"
